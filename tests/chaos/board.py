"""A piece of memory that the harness, its workers and the service's process share.

It holds what must outlive a kill: how much each worker has done, and at which mark the service's process is to kill
itself. Every word has one writer at a time.
"""

import mmap
from enum import IntEnum
from pathlib import Path
from typing import Self

SLOT_WORDS = 64
_HEAD_WORDS = 16
_MOST_SLOTS = 31
_PAGE_BYTES = 4 * mmap.PAGESIZE


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
    # Of engines with own tables
    ENGINE_ACTS = 14
    ENGINE_ACQUIRES = 15
    ENGINE_HITS_VERIFIED = 16
    ENGINE_BLOCKS_VERIFIED = 17
    ENGINE_OPAQUE_BLOCKS_VERIFIED = 18
    ENGINE_RESUMED_BLOCKS_VERIFIED = 19
    ENGINE_COMMITTED_BLOCKS = 20
    ENGINE_LEASED_BLOCKS = 21
    ENGINE_RELEASED_BLOCKS = 22
    ENGINE_WAITS = 23
    ENGINE_GRANTS = 24
    ENGINE_PENDING_SEEN = 25
    ENGINE_RECALLS = 26
    ENGINE_INVALIDATED_BLOCKS = 27
    ENGINE_INVALIDATIONS_REFUSED = 28
    ENGINE_BUMPS = 29
    ENGINE_STREAMS_REPLACED = 30
    DECODE_STEPS = 31
    DECODED_TOKENS = 32
    DECODED_BLOCKS_VERIFIED = 33
    LOST_BLOCKS = 34
    ENGINE_STOOD_BACK = 35
    ENGINE_HOLDINGS_COMPARED = 36


class Board:
    """The memory, mapped."""

    def __init__(self, path: Path | str) -> None:
        with Path(path).open("r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), _PAGE_BYTES)).cast("Q")

    @classmethod
    def create(cls, path: Path) -> Self:
        """Makes it, of zeros."""
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
