"""What the pool should do, written for clarity alone: paths instead of blocks, lists instead of columns.

A path is (namespace, the contents of all blocks up to this one): the whole meaning of a committed block. The
model knows how many blocks are in each class, which paths are present, and in which order they would go.
"""

from dataclasses import dataclass, field

Content = tuple[object, ...]
Path = tuple[str, tuple[Content, ...]]


SEQUENCE_ENTRIES = 128


class DoesNotFit(Exception):
    """The request does not fit now."""


class TooManyEntries(Exception):
    """The tables of the session's sequences would have more entries than they may."""


@dataclass(eq=False)
class NaiveSequence:
    """A sequence as lists: contents known so far, how many are computed and committed, which are shadows."""

    session: int
    namespace: str
    tokens: list[int]
    block_count: int
    computed: int
    cached: int
    committed: int
    shadows: set[int] = field(default_factory=set)
    progress_at: float = 0.0


class NaivePool:
    """Counts and orders by brute force."""

    def __init__(self, block_count: int, block_tokens: int, most_entries: int) -> None:
        self.total = block_count
        self.most_entries = most_entries
        self.block_tokens = block_tokens
        self.holders: dict[Path, int] = {}
        self.pins: dict[str, list[Path]] = {}
        self.release_order: list[Path] = []
        self.retired: set[str] = set()
        self.sequences: list[NaiveSequence] = []
        self.lost: list[NaiveSequence] = []
        self.evicted = 0
        self.now = 0.0

    # What there is

    def path(self, sequence: NaiveSequence, block: int) -> Path:
        size = self.block_tokens
        chunks = [tuple(sequence.tokens[start : start + size]) for start in range(0, (block + 1) * size, size)]
        return (sequence.namespace, tuple(chunks))

    def pinned(self) -> set[Path]:
        return {path for paths in self.pins.values() for path in paths}

    def counts(self) -> dict[str, int]:
        quarantined = sum(one.block_count - one.committed + len(one.shadows) for one in self.lost)
        reserved = sum(one.block_count - one.committed for one in self.sequences)
        shadows = sum(len(one.shadows) for one in self.sequences)
        held = {path for path, count in self.holders.items() if count}
        pinned = self.pinned()
        cached = [path for path in self.holders if path not in held and path not in pinned]
        used = quarantined + reserved + shadows + len(self.holders)
        return {
            "free": self.total - used,
            "reserved": reserved,
            "active": len(held) + shadows,
            "warm": len(pinned - held),
            "cached": len(cached),
            "quarantined": quarantined,
            "shared": sum(1 for count in self.holders.values() if count >= 2),
        }

    def present(self, namespace: str, tokens: list[int]) -> int:
        size = self.block_tokens
        chunks: tuple[Content, ...] = ()
        for start in range(0, len(tokens) - size + 1, size):
            chunks += (tuple(tokens[start : start + size]),)
            if (namespace, chunks) not in self.holders:
                return len(chunks) - 1
        return len(chunks)

    def computing(self, namespace: str, tokens: list[int], block: int) -> list[NaiveSequence]:
        """Live sequences whose first uncommitted block is this one of a prompt, behind the same prefix."""
        end = (block + 1) * self.block_tokens
        return [
            one
            for one in self.sequences
            if (one.namespace, one.committed, one.tokens[:end]) == (namespace, block, tokens[:end])
            and len(tokens) >= end
        ]

    def is_writer(self, sequence: NaiveSequence) -> bool:
        return len(sequence.tokens) // self.block_tokens > sequence.committed

    # What changes

    def take(self, fresh: int, protected: list[Path]) -> None:
        """Makes room for fresh blocks: free ones first, then the shortfall in order of release."""
        counts = self.counts()
        evictable = [path for path in self.release_order if path not in protected]
        if fresh > counts["free"] + len(evictable):
            raise DoesNotFit
        for path in evictable[: max(0, fresh - counts["free"])]:
            self.release_order.remove(path)
            del self.holders[path]
            self.evicted += 1

    def enter(self, session: int, block_count: int, sequence_count: int) -> None:
        """Says whether a session may have so much more in its tables [P8]."""
        there = sum(one.block_count + SEQUENCE_ENTRIES for one in self.sequences if one.session == session)
        if there + block_count + SEQUENCE_ENTRIES * sequence_count > self.most_entries:
            raise TooManyEntries

    def hold(self, path: Path) -> None:
        self.holders[path] = self.holders.get(path, 0) + 1
        if path in self.release_order:
            self.release_order.remove(path)

    def unhold(self, path: Path) -> None:
        self.holders[path] -= 1
        self._maybe_cached(path)

    def _maybe_cached(self, path: Path) -> None:
        if not self.holders[path] and path not in self.pinned():
            if path[0] in self.retired:
                del self.holders[path]
            else:
                self.release_order.append(path)

    def allocate(self, session: int, namespace: str, tokens: list[int], reserve: int, max_cached: int) -> NaiveSequence:
        size = self.block_tokens
        block_count = -(-(len(tokens) + reserve) // size)
        self.enter(session, block_count, 1)
        self.retired.discard(namespace)
        matched = min(self.present(namespace, tokens), max_cached // size)
        sequence = NaiveSequence(session, namespace, list(tokens), block_count, matched * size, matched * size, matched)
        paths = [self.path(sequence, block) for block in range(matched)]
        self.take(block_count - matched, paths)
        for path in paths:
            self.hold(path)
        sequence.progress_at = self.now
        self.sequences.append(sequence)
        return sequence

    def extend(self, sequence: NaiveSequence, capacity: int) -> None:
        block_count = max(sequence.block_count, -(-capacity // self.block_tokens))
        if block_count > sequence.block_count:
            self.enter(sequence.session, block_count - sequence.block_count, 0)
        self.take(block_count - sequence.block_count, [])
        sequence.block_count = block_count

    def commit(self, sequence: NaiveSequence, computed: int, new_tokens: list[int]) -> list[int]:
        """Returns the positions that became shadows."""
        was_writer, before = self.is_writer(sequence), sequence.computed
        sequence.tokens += new_tokens
        sequence.computed = computed
        if computed > before or (self.is_writer(sequence) and not was_writer):
            sequence.progress_at = self.now
        shadows = []
        for block in range(sequence.committed, computed // self.block_tokens):
            path = self.path(sequence, block)
            if path in self.holders:
                sequence.shadows.add(block)
                shadows.append(block)
            self.hold(path)
            sequence.committed = block + 1
        return shadows

    def switch(self, sequence: NaiveSequence) -> None:
        sequence.shadows.clear()

    def fork(self, sequence: NaiveSequence, child_count: int, reserve: int) -> list[NaiveSequence]:
        size = self.block_tokens
        known = max(len(sequence.tokens) + reserve, sequence.computed)
        block_count = -(-known // size)
        self.enter(sequence.session, block_count * child_count, child_count)
        self.take((block_count - sequence.committed) * child_count, [])
        children = []
        for _ in range(child_count):
            child = NaiveSequence(
                sequence.session,
                sequence.namespace,
                list(sequence.tokens),
                block_count,
                sequence.computed,
                sequence.computed,
                sequence.committed,
                progress_at=self.now,
            )
            for block in range(child.committed):
                self.hold(self.path(child, block))
            self.sequences.append(child)
            children.append(child)
        return children

    def release(self, sequence: NaiveSequence) -> None:
        (self.lost if sequence in self.lost else self.sequences).remove(sequence)
        for block in reversed(range(sequence.committed)):
            self.unhold(self.path(sequence, block))

    def adopt(self, sequence: NaiveSequence, session: int) -> None:
        """Moves a sequence to a session, as its latest: a session gives back in order of arrival."""
        if sequence.session != session:
            self.enter(session, sequence.block_count, 1)
        self.sequences.remove(sequence)
        sequence.session, sequence.progress_at = session, self.now
        self.sequences.append(sequence)

    def lose(self, session: int) -> None:
        gone = [one for one in self.sequences if one.session == session]
        self.sequences = [one for one in self.sequences if one.session != session]
        self.lost += gone

    def pin_present(self, name: str, namespace: str, tokens: list[int]) -> int:
        matched = self.present(namespace, tokens)
        probe = NaiveSequence(0, namespace, list(tokens), 0, 0, 0, 0)
        paths = [self.path(probe, block) for block in range(matched)]
        for path in paths:
            self.hold(path)
        old = self.pins.pop(name, [])
        if paths:
            self.pins[name] = paths
        for path in reversed(paths):
            self.unhold(path)
        for path in reversed(old):
            if path not in self.pinned() and path not in self.release_order:
                self._maybe_cached(path)
        return matched

    def unpin(self, name: str) -> None:
        for path in reversed(self.pins.pop(name)):
            if path not in self.pinned():
                self._maybe_cached(path)

    def retire(self, namespaces: set[str]) -> None:
        """Keeps nothing of these namespaces that nobody holds, until one is used anew."""
        self.retired |= namespaces
        for path in [path for path in self.release_order if path[0] in namespaces]:
            self.release_order.remove(path)
            del self.holders[path]
        for name in [name for name, paths in self.pins.items() if paths[0][0] in namespaces]:
            self.unpin(name)

    def evict_all(self) -> int:
        gone = len(self.release_order)
        for path in self.release_order:
            del self.holders[path]
        self.release_order.clear()
        self.evicted += gone
        return gone
