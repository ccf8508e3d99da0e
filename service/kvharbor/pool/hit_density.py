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
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

from kvharbor.pool.namespaces import NO_BLOCK
from kvharbor.pool.reuse import ReuseTimes, age_of
from kvharbor.pool.tree import PrefixTree
from kvharbor.pool.use_counts import MAX_USES, UseCounts

_NOWHERE: Final = 255
_WAITING: Final = 254
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
        self._content = array("I", bytes(4 * id_count))
        self._followed = bytearray(id_count)
        # The parent that waits for a child, by the child; the child, and the time of release, by the parent.
        self._waiting: dict[int, int] = {}
        self._waits_for: dict[int, tuple[int, int]] = {}
        self._counts = UseCounts(block_count)
        self._reuse = ReuseTimes(block_count, MAX_USES)
        self._now = 0

    def publish_many(self, blocks: Sequence[int], digests: Sequence[bytes]) -> None:
        """As EvictionPolicy says."""
        contents = array("I", b"".join([digest[:4] for digest in digests]))
        own_content, all_uses, followed, reuse = self._content, self._uses, self._followed, self._reuse
        for block, content, uses in zip(blocks, contents, self._counts.of(contents), strict=True):
            own_content[block] = content
            all_uses[block] = uses
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
        for block in blocks:
            kind = all_uses[block]
            if kind < MAX_USES:
                all_uses[block] = kind + 1
            else:
                kind -= 1
            place[block] = kind
            queues[kind][block] = now
            if followed[block]:
                self._reuse.released(self._content[block], kind, now)

    def revive_many(self, blocks: Iterable[int]) -> None:
        """As EvictionPolicy says."""
        followed = self._followed
        for block in blocks:
            self._leave(block)
            if followed[block]:
                self._reuse.reused(self._content[block], self._now)

    def remove_many(self, blocks: Iterable[int]) -> None:
        """As EvictionPolicy says."""
        for block in blocks:
            self._leave(block)

    def pop_many(self, block_count: int) -> list[int]:
        """As EvictionPolicy says."""
        victims: dict[int, None] = {}
        child_but, waiting = self._tree.child_but, self._waiting
        patience = _PATIENCE
        while patience and len(victims) < block_count:
            kind = self._poorest()
            queue = self._queues[kind]
            released_at = next(iter(queue.values()))
            run = []
            # All that were released at a time are worth the same, until a parent is let in.
            for block, time in islice(queue.items(), block_count - len(victims)):
                child = child_but(block, victims)
                if time != released_at or child != NO_BLOCK:
                    break
                victims[block] = None
                run.append(block)
                if block in waiting:
                    break
            self._evict(run, kind, victims)
            if not run:
                self._wait(block, child)
                patience -= 1
        return list(victims)

    def __len__(self) -> int:
        return sum(map(len, self._queues)) + len(self._waits_for)

    def __contains__(self, block: int) -> bool:
        return self._place[block] != _NOWHERE

    def __iter__(self) -> Iterator[int]:
        for queue in self._queues:
            yield from queue
        yield from self._waits_for

    def _poorest(self) -> int:
        """Returns the queue whose oldest block is worth least."""
        density, now = self._reuse.density, self._now
        ranked = [
            (density[kind][age_of(now - released_at)], released_at, kind)
            for kind, queue in enumerate(self._queues)
            if queue
            for released_at in (next(iter(queue.values())),)
        ]
        return min(ranked)[2]

    def _evict(self, blocks: list[int], kind: int, victims: Container[int]) -> None:
        """Takes out blocks of one queue that are evicted; parents that waited for them are next in it."""
        queue, place = self._queues[kind], self._place
        for block in blocks:
            del queue[block]
            place[block] = _NOWHERE
        self._counts.remember([self._content[block] for block in blocks], [self._uses[block] for block in blocks])
        if self._waiting:
            for block in blocks:
                self._let_parent_in(block, kind, victims)

    def _wait(self, block: int, child: int) -> None:
        self._waits_for[block] = child, self._queues[self._place[block]].pop(block)
        self._waiting[child] = block
        self._place[block] = _WAITING

    def _leave(self, block: int) -> None:
        """Takes a block out that stays as it is, or is freed by somebody's choice."""
        kind = self._place[block]
        self._place[block] = _NOWHERE
        if kind == _WAITING:
            child, _ = self._waits_for.pop(block)
            del self._waiting[child]
        else:
            del self._queues[kind][block]
        if self._waiting:
            self._let_parent_in(block, self._uses[block] - 1, ())

    def _let_parent_in(self, block: int, kind: int, victims: Container[int]) -> None:
        """Puts the parent that waited for a block, if any, in front of a queue, or lets it wait for the next child.

        Those that come before the block among the children are gone: it was the first, and has got no sibling since,
        as a parent that gets a child is held.
        """
        parent = self._waiting.pop(block, None)
        if parent is None:
            return
        _, released_at = self._waits_for.pop(parent)
        sibling = self._tree.sibling_but(block, victims)
        if sibling != NO_BLOCK:
            self._waits_for[parent] = sibling, released_at
            self._waiting[sibling] = parent
            return
        queue = self._queues[kind]
        queue[parent] = released_at
        queue.move_to_end(parent, last=False)
        self._place[parent] = kind
