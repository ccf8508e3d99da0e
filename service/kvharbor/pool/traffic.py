"""How blocks are used: how soon they are asked for again, how long they stay, and what is computed twice.

From a sample of the contents, so that it costs next to nothing: those with the smallest digests, at most `_MOST` at a
time, each standing for as many as the sample leaves out. A content is in the sample or not for good, whoever uses it
and when, which keeps such figures right (SHARDS: Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST
2015). Times are the shell's.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvharbor.pool.misses import MissKind
from kvharbor.pool.stats import Times, TrafficStats

BOUNDS_S: Final = tuple(0.25 * 4**power for power in range(11))
"""Upper bounds of a histogram's classes, a quarter of a second to three days; the last class has the rest."""
_MOST: Final = 1024
_EVERYTHING: Final = b"\xff" * 33  # more than any digest


@dataclass(slots=True)
class Histogram:
    """Times by class, and their sum."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    sum_s: float = 0.0

    def add(self, time_s: float, weight: int) -> None:
        """Counts a time as often as `weight` says."""
        self.counts[bisect_left(BOUNDS_S, time_s)] += weight
        self.sum_s += time_s * weight

    def times(self) -> Times:
        """Returns what it has now."""
        return Times(tuple(self.counts), self.sum_s)


class Traffic:
    """Follows the sample. Two comparisons in C a block that is not in it; bounded memory, about 300 kB."""

    def __init__(self) -> None:
        self.reuse_gaps = Histogram()
        """Between two uses of a content: published or matched, then matched or published again."""
        self.residences = Histogram()
        """From publication to eviction."""
        self.recomputed_block_count = 0
        """Published contents that had been published before: with unlimited memory they would have been there."""
        self.misses = dict.fromkeys(MissKind, 0)
        """Granted Allocates by why they have not reused more; each of them, not a sample."""
        self._below = _EVERYTHING
        self._weight = 1
        # When each content of the sample was last asked for.
        self._used_at: dict[bytes, float] = {}
        # Those that are in the index, by block, and since when.
        self._resident: dict[int, tuple[bytes, float]] = {}

    def published(self, blocks: Sequence[int], digests: Sequence[bytes], now: float) -> None:
        """Blocks have entered the index."""
        if min(digests) < self._below:
            for block, digest in zip(blocks, digests, strict=True):
                if digest < self._below:
                    self._published(block, digest, now)

    def matched(self, blocks: Iterable[int], now: float) -> None:
        """Blocks of the index are asked for again."""
        resident = self._resident
        if not resident.keys().isdisjoint(blocks):
            for block in blocks:
                if block in resident:
                    self._used(resident[block][0], now)

    def evicted(self, blocks: Iterable[int], now: float) -> None:
        """Blocks have left the index."""
        resident = self._resident
        if not resident.keys().isdisjoint(blocks):
            for block in blocks:
                if block in resident:
                    _, since = resident.pop(block)
                    self.residences.add(now - since, self._weight)

    def retired(self, blocks: Iterable[int]) -> None:
        """Blocks have left the index as nobody shall ask for them again."""
        resident = self._resident
        if not resident.keys().isdisjoint(blocks):
            for block in blocks:
                if block in resident:
                    self._used_at.pop(resident.pop(block)[0], None)

    def stats(self) -> TrafficStats:
        """Takes a snapshot."""
        return TrafficStats(
            misses=self.misses.copy(),
            recomputed_block_count=self.recomputed_block_count,
            reuse_gaps=self.reuse_gaps.times(),
            residences=self.residences.times(),
        )

    def _published(self, block: int, digest: bytes, now: float) -> None:
        if digest in self._used_at:
            self.recomputed_block_count += self._weight
        self._resident[block] = digest, now
        self._used(digest, now)
        if len(self._used_at) > _MOST:
            self._halve()

    def _used(self, digest: bytes, now: float) -> None:
        before = self._used_at.get(digest)
        if before is not None:
            self.reuse_gaps.add(now - before, self._weight)
        self._used_at[digest] = now

    def _halve(self) -> None:
        """Goes on with half of the sample, each content of which stands for twice as many."""
        self._weight *= 2
        below = self._below = ((1 << 64) // self._weight).to_bytes(8, "big")
        self._used_at = {digest: at for digest, at in self._used_at.items() if digest < below}
        self._resident = {block: kept for block, kept in self._resident.items() if kept[0] < below}
