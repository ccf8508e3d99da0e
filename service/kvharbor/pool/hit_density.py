"""Evicts where a kept block earns the fewest hits for the time that it would stay.

Cached blocks stand in a queue for each number of uses, in order of release. What is known of a queue is how soon its
blocks were asked for again: hits by age, those of evicted blocks included. From that the *hit density* of an age
follows: hits still to come, over the block-time until they come. The next victim is the oldest block of the queue whose
oldest block is worth least; all being equal, the oldest of all. This is the ranking of LHD (Beckmann, Chen and Cidon:
"LHD: Improving Cache Hit Rate by Maximizing Hit Density", NSDI 2018), with queues in place of sampled candidates,
and with evicted blocks remembered: a block that had to go before it was asked for again tells what keeping it would
have earned.

Time is the number of blocks published so far: it stands still while everything hits.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from kvharbor.pool.namespaces import NO_BLOCK
from kvharbor.pool.reuse import ReuseTimes, age_of
from kvharbor.pool.tree import PrefixTree
from kvharbor.pool.use_counts import MAX_USES, UseCounts

_NOWHERE: Final = 255
_WAITING: Final = 254
_LAST: Final = (float("inf"), 0, 0)
_PATIENCE: Final = 1024
"""So many blocks are told to wait in one step, at most: a chain may be as long as the pool."""


class HitDensity:
    """An EvictionPolicy. O(1) a block, amortised; about 30 bytes a block beside its queues, and a bounded sample.

    A block whose turn comes while it has cached children waits for them, and then stands in front of the queue that the
    last of them stood in [P2].
    """

    def __init__(self, block_count: int, tree: PrefixTree) -> None:
        id_count = len(tree.parent)
        self._tree = tree
        self._queues: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(MAX_USES)]
        # Each cached block's queue.
        self._place = bytearray([_NOWHERE]) * id_count
        self._uses = bytearray(id_count)
        # The first queue of each block's class of hints: there are MAX_USES of each class that has been seen.
        self._first_kind = bytearray(id_count)
        self._content = array("I", bytes(4 * id_count))
        self._followed = bytearray(id_count)
        # The parent that waits for a child, by the child; the child, and the time of release, by the parent. Not as
        # pairs: one for each block of a long chain would have the garbage collector look at all that there is.
        self._waiting: dict[int, int] = {}
        self._waits_for: dict[int, int] = {}
        self._waits_since: dict[int, int] = {}
        self._counts = UseCounts(block_count)
        self._reuse = ReuseTimes(block_count, MAX_USES)
        self._now = 0

    def publish_many(self, blocks: Sequence[int], digests: Sequence[bytes], hint_class: int = 0) -> None:
        """As EvictionPolicy says."""
        first_kind = hint_class * MAX_USES
        while first_kind >= len(self._queues):
            self._queues += [OrderedDict() for _ in range(MAX_USES)]
            self._reuse.add_class()
        contents = array("I", b"".join([digest[:4] for digest in digests]))
        own_content, all_uses, first_kinds = self._content, self._uses, self._first_kind
        followed, reuse = self._followed, self._reuse
        for block, content, uses in zip(blocks, contents, self._counts.of(contents), strict=True):
            own_content[block] = content
            all_uses[block] = uses
            first_kinds[block] = first_kind
            if content & reuse.sample_mask:
                followed[block] = 0
            else:
                followed[block] = 1
                reuse.reused(content, self._now)
        self._now += len(blocks)
        self._counts.advance(len(blocks))
        reuse.advance(self._now)

    def insert_many(self, blocks: Iterable[int]) -> None:
        """As EvictionPolicy says."""
        all_uses, place, queues, followed, now = self._uses, self._place, self._queues, self._followed, self._now
        first_kinds = self._first_kind
        for block in blocks:
            uses = all_uses[block]
            if uses < MAX_USES:
                all_uses[block] = uses + 1
            else:
                uses -= 1
            kind = place[block] = first_kinds[block] + uses
            queues[kind][block] = now
            if followed[block]:
                self._reuse.released(self._content[block], kind, now)

    def revive_many(self, blocks: Iterable[int]) -> None:
        """As EvictionPolicy says."""
        place, queues, waiting, followed = self._place, self._queues, self._waiting, self._followed
        for block in blocks:
            if waiting:
                self._leave(block)
            else:  # it does not wait, nor does anybody for it
                del queues[place[block]][block]
                place[block] = _NOWHERE
            if followed[block]:
                self._reuse.reused(self._content[block], self._now)

    def remove_many(self, blocks: Iterable[int]) -> None:
        """As EvictionPolicy says."""
        for block in blocks:
            self._leave(block)

    def pop_many(self, block_count: int) -> list[int]:
        """As EvictionPolicy says."""
        victims: list[int] = []
        # Of the oldest block of each queue. While one queue is taken from, the others stay as they are.
        ranks = {kind: self._rank(kind) for kind, queue in enumerate(self._queues) if queue}
        patience = _PATIENCE
        while patience and len(victims) < block_count:
            _, released_at, kind = min(ranks.values())
            freed, patience = self._take(kind, released_at, victims, block_count, patience)
            if freed != NO_BLOCK:
                del ranks[kind]
                self._climb(freed, victims, block_count, kind, min(ranks.values(), default=_LAST))
            if self._queues[kind]:
                ranks[kind] = self._rank(kind)
            else:
                ranks.pop(kind, None)
        self._counts.remember([self._content[block] for block in victims], [self._uses[block] for block in victims])
        return victims

    def __len__(self) -> int:
        return sum(map(len, self._queues)) + len(self._waits_for)

    def __contains__(self, block: int) -> bool:
        return self._place[block] != _NOWHERE

    def __iter__(self) -> Iterator[int]:
        for queue in self._queues:
            yield from queue
        yield from self._waits_for

    def _rank(self, kind: int) -> tuple[float, int, int]:
        """Returns what the oldest block of a queue is worth, and what decides between equals."""
        return self._worth(kind, next(iter(self._queues[kind].values())))

    def _worth(self, kind: int, released_at: int) -> tuple[float, int, int]:
        return self._reuse.density[kind][age_of(self._now - released_at)], released_at, kind

    def _take(self, kind: int, released_at: int, victims: list[int], most: int, patience: int) -> tuple[int, int]:
        """Takes the oldest blocks out of a queue, all that are worth the same: victims, and parents that have to wait.

        Ends at a victim that a parent waits for; returns it, or NO_BLOCK, and what is left of the patience.
        """
        queue, place, waiting = self._queues[kind], self._place, self._waiting
        first_child, next_sibling = self._tree.first_child, self._tree.next_sibling
        taken: list[int] = []
        freed = NO_BLOCK
        for block, time in queue.items():
            if time != released_at or len(victims) == most or not patience:
                break
            taken.append(block)
            child = first_child[block]
            while child != NO_BLOCK and place[child] == _NOWHERE:
                child = next_sibling[child]
            if child != NO_BLOCK:
                self._wait(block, child, released_at)
                patience -= 1
                continue
            place[block] = _NOWHERE
            victims.append(block)
            if block in waiting:
                freed = block
                break
        for block in taken:
            del queue[block]
        return freed, patience

    def _climb(self, block: int, victims: list[int], most: int, kind: int, bound: tuple[float, int, int]) -> None:
        """Goes on with the parent that waited for a victim, and its parent: each is next in the queue of its child."""
        while (freed := self._freed_by(block)) is not None:
            block, released_at = freed
            if len(victims) == most or self._worth(kind, released_at) > bound:
                self._put_in_front(block, kind, released_at)
                return
            self._place[block] = _NOWHERE
            victims.append(block)

    def _wait(self, block: int, child: int, released_at: int) -> None:
        self._waits_for[block], self._waits_since[block] = child, released_at
        self._waiting[child] = block
        self._place[block] = _WAITING

    def _freed_by(self, block: int) -> tuple[int, int] | None:
        """Returns the parent that waited for a block that is gone, and its time, or lets it wait for the next child.

        Those that come before the block among the children are gone: it was the first, and has got no sibling since,
        as a parent that gets a child is held.
        """
        parent = self._waiting.pop(block, None)
        if parent is None:
            return None
        place, next_sibling = self._place, self._tree.next_sibling
        sibling = next_sibling[block]
        while sibling != NO_BLOCK and place[sibling] == _NOWHERE:
            sibling = next_sibling[sibling]
        if sibling == NO_BLOCK:
            del self._waits_for[parent]
            return parent, self._waits_since.pop(parent)
        self._waits_for[parent] = sibling
        self._waiting[sibling] = parent
        return None

    def _put_in_front(self, block: int, kind: int, released_at: int) -> None:
        queue = self._queues[kind]
        queue[block] = released_at
        queue.move_to_end(block, last=False)
        self._place[block] = kind

    def _leave(self, block: int) -> None:
        """Takes a block out that stays as it is, or is freed by somebody's choice."""
        kind = self._place[block]
        self._place[block] = _NOWHERE
        if kind == _WAITING:
            del self._waiting[self._waits_for.pop(block)], self._waits_since[block]
        else:
            del self._queues[kind][block]
        if self._waiting and (freed := self._freed_by(block)) is not None:
            self._put_in_front(freed[0], self._first_kind[block] + self._uses[block] - 1, freed[1])
