"""A page that the harness, its workers and the service's process share.

It holds what must outlive a kill: how much each worker has done, and at which mark the service's process is to kill
itself. Every word has one writer at a time.
"""

import mmap
from enum import IntEnum
from pathlib import Path
from typing import Self

SLOT_WORDS = 16
_HEAD_WORDS = 16
_MOST_SLOTS = 28
_PAGE_BYTES = mmap.PAGESIZE


class Head(IntEnum):
    """Words of the whole run."""

    ARMED = 0  # index + 1 of the mark that kills; 0: none
    PASSES = 1  # so many passes of the armed mark are survived
    FIRED = 2  # marks that have killed
    CHECKS = 3  # full checks of a pool's invariants


class Count(IntEnum):
    """Words of a worker's slot, added up over all that had it; each is a figure of the report."""

    ACTS = 0
    ALLOCATIONS = 1
    HITS_VERIFIED = 2
    BLOCKS_VERIFIED = 3
    TAILS_VERIFIED = 4
    FORKS = 5
    ADOPTIONS = 6
    WARMUPS = 7
    SHADOWS_SWITCHED = 8
    REFUSALS = 9
    CALLS_WITHOUT_OWNER = 10
    NEW_EPOCHS = 11
    LOST_SEQUENCES = 12
    LOST_SESSIONS = 13


class Board:
    """The page, mapped."""

    def __init__(self, path: Path | str) -> None:
        with Path(path).open("r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), _PAGE_BYTES)).cast("Q")

    @classmethod
    def create(cls, path: Path) -> Self:
        """Makes a page of zeros."""
        path.write_bytes(bytes(_PAGE_BYTES))
        return cls(path)

    def head(self, word: Head) -> int:
        """Returns a word of the run."""
        return self._words[word]

    def set_head(self, word: Head, value: int) -> None:
        """Stores a word of the run."""
        self._words[word] = value

    def add(self, slot: int, count: Count, value: int = 1) -> None:
        """Adds to a count of a worker's slot."""
        self._words[self._place(slot, count)] += value

    def total(self, count: Count) -> int:
        """Returns the sum over all slots."""
        return sum(self._words[self._place(slot, count)] for slot in range(_MOST_SLOTS))

    @staticmethod
    def _place(slot: int, count: Count) -> int:
        return _HEAD_WORDS + slot * SLOT_WORDS + count
