"""HitDensity as its docstrings say, written for clarity alone: lists that are searched, one victim at a time."""

from collections.abc import Iterable, Iterator, Sequence

from kvharbor.pool import hit_density
from kvharbor.pool.hit_density import HitDensity
from kvharbor.pool.tree import PrefixTree

USES = 8
KINDS = 16 * USES
AGES = 40


def age_of(count: int) -> int:
    age = 0
    while 2 << age <= count:
        age += 1
    return age


class NaiveReuse:
    """Of every content: when it was released, and how soon it was asked for again."""

    def __init__(self, block_count: int) -> None:
        self.block_count = block_count
        self.horizon = age_of(4 * block_count)
        self.followed: dict[int, tuple[int, int]] = {}
        self.releases = [0.0] * KINDS
        self.hits = [[0.0] * AGES for _ in range(KINDS)]
        self.seen: list[tuple[float, list[float]]] = [(0.0, [0.0] * AGES)] * KINDS
        self.class_count = 1
        self.seen_at = 0

    def reused(self, content: int, now: int) -> None:
        if content in self.followed:
            kind, released_at = self.followed.pop(content)
            self.hits[kind][age_of(now - released_at)] += 1

    def released(self, content: int, kind: int, now: int) -> None:
        self.followed[content] = kind, now
        self.releases[kind] += 1

    def advance(self, now: int) -> None:
        if now - self.seen_at < max(self.block_count // 4, 64):
            return
        self.seen_at = now
        oldest = now - 8 * self.block_count
        self.followed = {content: one for content, one in self.followed.items() if one[1] >= oldest}
        self.seen = [self.with_prior(kind) for kind in range(KINDS)]
        self.releases = [count * 0.98 for count in self.releases]
        self.hits = [[count * 0.98 for count in hits] for hits in self.hits]

    def with_prior(self, kind: int) -> tuple[float, list[float]]:
        """A class that is new is like the one without hints: 32 releases of that one count for its own."""
        like = kind % USES
        if kind == like or not self.releases[like]:
            return self.releases[kind], list(self.hits[kind])
        share = min(32 / self.releases[like], 1.0)
        hits = [own + share * other for own, other in zip(self.hits[kind], self.hits[like], strict=True)]
        return self.releases[kind] + share * self.releases[like], hits

    def know_class(self, hint_class: int) -> None:
        while self.class_count <= hint_class:
            first = self.class_count * USES
            self.seen[first : first + USES] = self.seen[:USES]
            self.class_count += 1

    def density(self, kind: int, age: int) -> float:
        releases, hits = self.seen[kind]
        alive = [releases + 1]
        for count in hits:
            alive.append(max(alive[-1] - count, 1e-9))
        to_come = block_time = 0.0
        for each in reversed(range(age, max(self.horizon, age) + 1)):
            to_come += hits[each]
            block_time += 2**each * (alive[each] + alive[each + 1]) / 2
        return to_come / block_time


class NaiveHitDensity:
    """An EvictionPolicy. The sample is everything, as in any pool of less than 1,024 blocks."""

    def __init__(self, block_count: int, tree: PrefixTree) -> None:
        self.tree = tree
        self.span = 4 * block_count
        self.place_count = 1
        while self.place_count < self.span:
            self.place_count *= 2
        self.queues: list[list[int]] = [[] for _ in range(KINDS)]
        self.released_at: dict[int, int] = {}
        self.waits_for: dict[int, int] = {}
        self.uses: dict[int, int] = {}
        self.hint_class: dict[int, int] = {}
        self.content: dict[int, int] = {}
        self.remembered: list[dict[int, tuple[int, int]]] = [{}, {}]
        self.remembered_since = 0
        self.reuse = NaiveReuse(block_count)
        self.now = 0

    def publish_many(self, blocks: Sequence[int], digests: Sequence[bytes], hint_class: int = 0) -> None:
        self.reuse.know_class(hint_class)
        for block, digest in zip(blocks, digests, strict=True):
            content = self.content[block] = int.from_bytes(digest[:4], "little")
            self.uses[block] = self.known_uses(content)
            self.hint_class[block] = hint_class
            self.reuse.reused(content, self.now)
        self.now += len(blocks)
        self.remembered_since += len(blocks)
        if self.remembered_since >= self.span:
            self.remembered_since = 0
            self.remembered = [{}, self.remembered[0]]
        self.reuse.advance(self.now)

    def known_uses(self, content: int) -> int:
        for table in self.remembered:
            mark, uses = table.get(content % self.place_count, (None, 0))
            if mark == content >> 20:
                return uses
        return 0

    def insert_many(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.uses[block] = min(self.uses[block] + 1, USES)
            kind = self.kind_of(block)
            self.queues[kind].append(block)
            self.released_at[block] = self.now
            self.reuse.released(self.content[block], kind, self.now)

    def revive_many(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.leave(block)
            self.reuse.reused(self.content[block], self.now)

    def remove_many(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.leave(block)

    def kind_of(self, block: int) -> int:
        return self.hint_class[block] * USES + self.uses[block] - 1

    def pop_many(self, block_count: int) -> list[int]:
        victims: list[int] = []
        wait_count = 0
        while len(victims) < block_count and wait_count < hit_density._PATIENCE:
            kind = self.poorest()
            block = self.queues[kind][0]
            if children := self.cached_children(block):
                self.queues[kind].remove(block)
                self.waits_for[block] = children[0]
                wait_count += 1
                continue
            victims.append(block)
            content = self.content[block]
            self.remembered[0][content % self.place_count] = content >> 20, self.uses[block]
            self.leave(block)
        return victims

    def poorest(self) -> int:
        def worth(kind: int) -> tuple[float, int, int]:
            released_at = self.released_at[self.queues[kind][0]]
            return self.reuse.density(kind, age_of(self.now - released_at)), released_at, kind

        return min((kind for kind in range(KINDS) if self.queues[kind]), key=worth)

    def cached_children(self, block: int) -> list[int]:
        return [child for child in self.tree.children(block) if child in self.released_at]

    def leave(self, block: int) -> None:
        del self.released_at[block]
        kind = self.kind_of(block)
        for each, queue in enumerate(self.queues):
            if block in queue:
                queue.remove(block)
                kind = each
        self.waits_for.pop(block, None)
        for parent in [parent for parent, child in self.waits_for.items() if child == block]:
            if children := self.cached_children(parent):
                self.waits_for[parent] = children[0]
            else:
                del self.waits_for[parent]
                self.queues[kind].insert(0, parent)


class Compared:
    """An EvictionPolicy that is both, and fails where they differ."""

    def __init__(self, block_count: int, tree: PrefixTree) -> None:
        self.real = HitDensity(block_count, tree)
        self.naive = NaiveHitDensity(block_count, tree)
        self.victim_count = self.wait_count = self.ranked_count = 0

    def publish_many(self, blocks: Sequence[int], digests: Sequence[bytes], hint_class: int = 0) -> None:
        self.real.publish_many(blocks, digests, hint_class)
        self.naive.publish_many(blocks, digests, hint_class)

    def insert_many(self, blocks: Iterable[int]) -> None:
        chosen = list(blocks)
        self.real.insert_many(chosen)
        self.naive.insert_many(chosen)

    def revive_many(self, blocks: Iterable[int]) -> None:
        chosen = list(blocks)
        self.real.revive_many(chosen)
        self.naive.revive_many(chosen)

    def remove_many(self, blocks: Iterable[int]) -> None:
        chosen = list(blocks)
        self.real.remove_many(chosen)
        self.naive.remove_many(chosen)

    def pop_many(self, block_count: int) -> list[int]:
        expected = self.naive.pop_many(block_count)
        victims = self.real.pop_many(block_count)
        assert victims == expected
        self.victim_count += len(victims)
        self.wait_count += len(self.naive.waits_for)
        self.ranked_count += any(map(any, self.real._reuse.density))
        return victims

    def __len__(self) -> int:
        assert len(self.real) == len(self.naive.released_at)
        return len(self.real)

    def __contains__(self, block: int) -> bool:
        return block in self.real

    def __iter__(self) -> Iterator[int]:
        assert set(self.real) == set(self.naive.released_at)
        return iter(self.real)
