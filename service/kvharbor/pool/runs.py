"""The free blocks of a pool, kept as runs of consecutive ids.

[P4] A block has one place here. [P5] A table grows by extending its last run, else from the longest free
run, so that views over it stay long.
"""

import heapq
from collections.abc import Iterable, Iterator


class FreeRuns:
    """Free block ids in maximal runs. Costs O(runs touched * log runs), whatever the size of the pool."""

    def __init__(self, first_block: int, block_count: int) -> None:
        self.count = 0
        self._length_by_start: dict[int, int] = {}
        self._start_by_end: dict[int, int] = {}
        # (-length, start), stale entries included: one is current if the run still has that length.
        self._longest: list[tuple[int, int]] = []
        if block_count:
            self._add(first_block, block_count)

    def __iter__(self) -> Iterator[int]:
        for start, length in sorted(self._length_by_start.items()):
            yield from range(start, start + length)

    @property
    def run_count(self) -> int:
        """Number of maximal runs."""
        return len(self._length_by_start)

    def take(self, block_count: int, after: int | None = None) -> list[int]:
        """Removes blocks and returns them in table order.

        `after` is the last block of the table that grows. The caller has checked that `block_count` are free.
        """
        taken: list[int] = []
        if after is not None:
            length = self._length_by_start.get(after + 1)
            if length is not None:
                self._take_front(after + 1, min(length, block_count), taken)
        while len(taken) < block_count:
            self._take_front(self._longest_start(), block_count - len(taken), taken)
        return taken

    def give(self, blocks: Iterable[int]) -> None:
        """Adds blocks, none of which is free already, in any order."""
        run_start = run_end = -1
        for block in sorted(blocks):
            if block == run_end:
                run_end += 1
                continue
            if run_end > run_start:
                self._merge(run_start, run_end)
            run_start, run_end = block, block + 1
        if run_end > run_start:
            self._merge(run_start, run_end)

    def _merge(self, start: int, end: int) -> None:
        before = self._start_by_end.get(start)
        if before is not None:
            self._remove(before)
            start = before
        after_length = self._length_by_start.get(end)
        if after_length is not None:
            self._remove(end)
            end += after_length
        self._add(start, end - start)

    def _take_front(self, start: int, wanted: int, taken: list[int]) -> None:
        length = self._length_by_start[start]
        self._remove(start)
        part = min(length, wanted)
        taken.extend(range(start, start + part))
        if part < length:
            self._add(start + part, length - part)

    def _longest_start(self) -> int:
        longest = self._longest
        while True:
            negative_length, start = longest[0]
            if self._length_by_start.get(start) == -negative_length:
                return start
            heapq.heappop(longest)

    def _add(self, start: int, length: int) -> None:
        self._length_by_start[start] = length
        self._start_by_end[start + length] = start
        self.count += length
        heapq.heappush(self._longest, (-length, start))
        # Stale entries may outnumber the runs by a constant factor at most, else the heap grows for ever.
        if len(self._longest) > 2 * len(self._length_by_start) + 64:
            self._longest = [(-run_length, run) for run, run_length in self._length_by_start.items()]
            heapq.heapify(self._longest)

    def _remove(self, start: int) -> None:
        length = self._length_by_start.pop(start)
        del self._start_by_end[start + length]
        self.count -= length


def run_end(blocks: list[int], start: int) -> int:
    """Returns where the run of consecutive ids ends that begins at `start` of a list."""
    first = blocks[start]
    if blocks[-1] - first == len(blocks) - 1 - start and blocks[start:] == list(range(first, blocks[-1] + 1)):
        return len(blocks)
    end = start + 1
    while end < len(blocks) and blocks[end] == first + end - start:
        end += 1
    return end
