"""What sessions have said that they compute block by block, without a sequence: entries among the writers. Rule [B6].

A mark is the contents in a row that its session is still to compute, behind a node that it holds. It moves over what
the session commits or acquires, and ends when nothing is left, when the session abandons it [B8] or lets go of the
node, when it has stalled, or with the session.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvharbor.pool.namespaces import Namespace, Namespaces
from kvharbor.pool.writers import PATIENCE_S, Writers, common_block_count, extras_to_come

MAX_MARKS: Final = 1024
"""Of one session: what one of them does may concern all."""
_MOST_EXPIRED: Final = 256
"""At a time: those that are left have stalled, which is all that is told of them."""


@dataclass(slots=True, eq=False)
class Mark:
    """Contents to come behind `chain_node`; `extras` count from the first block of the chain that was acquired.

    `extra_bytes` is how much `extras` are, which are those to come once the mark is entered.
    `seen_at`: when it has last got on or was asked for again, or was found not to have stalled.
    """

    session: int
    namespace: Namespace
    chain_node: int
    committed_blocks: int
    tail: bytearray
    extras: dict[int, bytes]
    writer_key: bytes | None = None
    progress_at: float = 0.0
    seen_at: float = 0.0
    extra_bytes: int = 0


class Marks:
    """All marks, each among the writers. A session has at most MAX_MARKS, of at most `most_blocks` contents in all.

    Extra keys count as contents of as many bytes.
    """

    def __init__(self, writers: Writers, namespaces: Namespaces, most_blocks: int) -> None:
        self._writers = writers
        self._namespaces = namespaces
        self._most_blocks = most_blocks
        # In the order of `seen_at`.
        self.by_age: OrderedDict[Mark, None] = OrderedDict()
        # By session and node.
        self.by_session: dict[int, dict[int, dict[Mark, None]]] = {}
        self.block_counts: Counter[int] = Counter()
        self.counts: Counter[int] = Counter()

    def add(self, mark: Mark, now: float) -> None:
        """Enters a mark of some contents. Too many are not entered at all.

        If it is known already, its session has said that it is at work [W7]. One that has stalled all the same is
        kept for that: made anew, it would be waited for anew.
        """
        mark.extras = {block: extra for block, extra in mark.extras.items() if block >= mark.committed_blocks}
        mark.extra_bytes = sum(map(len, mark.extras.values()))
        block_count = self.size(mark)
        first = bytes(mark.tail[: self._writers.content_bytes(mark.namespace)])
        for other in self._own(mark.session, mark.chain_node, first + mark.extras.get(mark.committed_blocks, b"")):
            if other.tail == mark.tail and extras_to_come(other) == extras_to_come(mark):
                self._writers.signs[mark.session] = now
                self._see(other, now)
                return
        if self.block_counts[mark.session] + block_count > self._most_blocks or self.counts[mark.session] >= MAX_MARKS:
            return
        mark.namespace.user_count += 1
        self.block_counts[mark.session] += block_count
        self.counts[mark.session] += 1
        self._enter(mark, now)

    def advance(
        self, session: int, nodes: Sequence[int], first: int, contents: bytes, extras: Mapping[int, bytes], now: float
    ) -> None:
        """A session holds more of a chain: its block `first` + i is behind nodes[i], and is nodes[i + 1]."""
        by_node = self.by_session.get(session)
        if not by_node:
            return
        end = first + len(nodes) - 1
        for block, node in enumerate(nodes[:-1], first):
            if node not in by_node:
                continue
            size = self._writers.content_bytes(next(iter(by_node[node])).namespace)
            content = contents[block * size : (block + 1) * size] + extras.get(block, b"")
            to_move = self._own(session, node, content)
            if not to_move:
                continue
            rest = contents[block * size : end * size]
            behind = {place - block: extra for place, extra in extras.items() if place >= block}
            for mark in to_move:
                count = common_block_count(rest, behind, mark.tail, extras_to_come(mark), size)
                self._move(mark, nodes[block - first + count], count, now)

    def abandon(
        self, session: int, nodes: Sequence[int], first: int, contents: bytes, extras: Mapping[int, bytes]
    ) -> None:
        """A session does not compute a chain any more, of which nodes[i] is the one before its block `first` + i."""
        by_node = self.by_session.get(session, {})
        for block, node in enumerate(nodes, first):
            if node not in by_node:
                continue
            size = self._writers.content_bytes(next(iter(by_node[node])).namespace)
            content = contents[block * size : (block + 1) * size] + extras.get(block, b"")
            for mark in self._own(session, node, content):
                if len(mark.tail) == len(contents) - block * size and contents.endswith(mark.tail):
                    behind = {place - block: extra for place, extra in extras.items() if place >= block}
                    if extras_to_come(mark) == behind:
                        self._end(mark)

    def end_behind(self, session: int, nodes: Iterable[int]) -> None:
        """A session does not hold these blocks any more."""
        by_node = self.by_session.get(session)
        if by_node:
            for node in nodes:
                for mark in list(by_node.get(node, ())):
                    self._end(mark)

    def end_session(self, session: int) -> None:
        """Ends a session's marks."""
        for marks in list(self.by_session.get(session, {}).values()):
            for mark in list(marks):
                self._end(mark)

    def expire(self, now: float) -> None:
        """Ends those that have stalled, some at a time; one that was kept by a sign is looked at a while later [W7]."""
        for _ in range(_MOST_EXPIRED):
            mark = next(iter(self.by_age), None)
            if mark is None or now - mark.seen_at < PATIENCE_S:
                break
            if self._writers.has_stalled(mark, now):
                self._end(mark)
            else:
                self._see(mark, now)

    def _see(self, mark: Mark, now: float) -> None:
        mark.seen_at = now
        self.by_age[mark] = None
        self.by_age.move_to_end(mark)

    def _own(self, session: int, node: int, content: bytes) -> list[Mark]:
        """Returns a session's marks whose next block has this content and comes behind a node."""
        return [one for one in self._writers.own(session, node, content) if isinstance(one, Mark)]

    def size(self, mark: Mark) -> int:
        """Returns how many contents a mark counts for."""
        return -(-(len(mark.tail) + mark.extra_bytes) // self._writers.content_bytes(mark.namespace))

    def _enter(self, mark: Mark, now: float) -> None:
        self.by_session.setdefault(mark.session, {}).setdefault(mark.chain_node, {})[mark] = None
        self._see(mark, now)
        self._writers.place(mark, now)

    def _leave(self, mark: Mark) -> None:
        by_node = self.by_session[mark.session]
        marks = by_node[mark.chain_node]
        del marks[mark]
        if not marks:
            del by_node[mark.chain_node]

    def _move(self, mark: Mark, node: int, block_count: int, now: float) -> None:
        moved_bytes = block_count * self._writers.content_bytes(mark.namespace)
        if moved_bytes == len(mark.tail):
            self._end(mark)
            return
        self._leave(mark)
        size = self.size(mark)
        del mark.tail[:moved_bytes]
        for block in range(mark.committed_blocks, mark.committed_blocks + block_count):
            mark.extra_bytes -= len(mark.extras.pop(block, b""))
        mark.chain_node = node
        mark.committed_blocks += block_count
        self.block_counts[mark.session] += self.size(mark) - size
        self._enter(mark, now)

    def _end(self, mark: Mark) -> None:
        self._leave(mark)
        self._writers.remove(mark)
        del self.by_age[mark]
        self.block_counts[mark.session] -= self.size(mark)
        self.counts[mark.session] -= 1
        if not self.by_session[mark.session]:
            del self.by_session[mark.session], self.block_counts[mark.session], self.counts[mark.session]
        self._namespaces.disuse(mark.namespace)
