"""What of a pool outlives its process: shared memory that the next process recovers the pool from.

Per block there are a state word, a stamp and a record (`records.py`); things of any length are in `cells.py`. A kill
may come between any two stores and in the middle of any long one, so a word is what decides, and it is one aligned
store of eight bytes: it is there or not.

    word    generation << 27 | session << 3 | held << 2 | state      (state: FREE, RESERVED, COMMITTED, SHADOW)
    stamp   place in the order of release, of a COMMITTED block that nobody holds
    record  what the block was committed for

A word of 0 is a block that was never used: generation 1, FREE. The session of a COMMITTED word means nothing, so to
commit, to hold and to release is one store of the word's lowest byte. The record is immutable while the word is
COMMITTED or SHADOW.

For each transition the order of the stores, and why a kill between any two of them is safe:

[L1] FREE -> RESERVED: the word, before the reply that grants the block. Killed before the reply, nobody knows of the
     block, its session does not name it, and it goes back.
[L2] RESERVED -> COMMITTED or SHADOW: cell of the namespace, cells of the extra keys, record, then the word; parents
     before children. Until the word says so the record is not looked at; after it the record is whole. Killed
     halfway, a leading part of the chain is committed, and the session finds that when it resumes.
[L3] First hold on a block: the word with `held`, before the reply. Last hold gone: the stamp, then the word without
     `held`, deepest block first. Killed between, the block is held although nobody needs it: it is out of use until
     every session has resumed, never handed out too early. Ancestors of a held block are held.
[L4] -> FREE: the word with the next generation, children before parents, before the block is given out again and
     before its cells are. Killed halfway, the rest is still what it was; no session names it. Of a block that is
     evicted for a table the word says RESERVED at once, in the same slice, with the next generation; killed between
     those of several, a child whose parent went first has lost its prefix and is a miss, and it was evicted as well.
     So does that of a block that its session invalidates, children before parents.
[L5] Handoff and Adopt: the word with session 0, then with the adopter's. A token ends with its process, so a block
     of session 0 belongs to nobody then.
[L6] A generation never goes back, and is raised by every step to FREE. So a (block, generation) that an engine
     remembers names the content that it was told, or nothing.

Sequences are not here: their sessions name them when they resume (`resume.py`).
"""

import hashlib
import sys
from collections.abc import Sequence
from mmap import mmap
from typing import Final, Self

from kvharbor.pool.cells import CELL_BYTES, Cells
from kvharbor.pool.records import Records, record_sizes
from kvharbor.pool.results import PoolConfig

WritableBuffer = bytearray | memoryview | mmap

HELD: Final = 1 << 2
STATE_MASK: Final = HELD - 1
SESSION_SHIFT: Final = 3
GENERATION_SHIFT: Final = 27
MAX_SESSION: Final = (1 << (GENERATION_SHIFT - SESSION_SHIFT)) - 1
"""A pool cannot tell more sessions apart than this, over its whole epoch."""

_MAGIC: Final = b"kvharbor ledger 3"
_PAGE: Final = 4096


class LedgerUnfit(Exception):
    """The buffer holds no ledger of this pool, or one of another version of kvharbor: start cold."""


def ledger_bytes(config: PoolConfig) -> int:
    """Returns the size of the buffer that a pool's ledger needs; pages are touched only as blocks are used."""
    return _PAGE + sum(_rounded(size) for size in _sizes(config))


class Ledger:
    """A pool's ledger on a buffer. It knows nothing of the pool but what it is told to store."""

    def __init__(self, config: PoolConfig, buffer: WritableBuffer) -> None:
        whole = memoryview(buffer).cast("B")
        if len(whole) < ledger_bytes(config):
            raise LedgerUnfit(f"{len(whole)} bytes are no ledger of {config.block_count} blocks")
        self._header = whole[:_PAGE]
        columns = []
        offset = _PAGE
        for size in _sizes(config):
            columns.append(whole[offset : offset + size])
            offset += _rounded(size)
        self.words = columns[0].cast("Q")
        self.low_bytes = columns[0][0 if sys.byteorder == "little" else 7 :: 8]
        self.stamps = columns[1].cast("Q")
        self.cells = Cells(columns[2])
        self.records = Records(config, columns[3:], self.cells)
        self.next_stamp = 1

    @classmethod
    def create(cls, config: PoolConfig, buffer: WritableBuffer) -> Self:
        """Starts a ledger on a buffer of zeros, as a new memfd is."""
        ledger = cls(config, buffer)
        header = _header(config)
        ledger._header[: len(header)] = header
        return ledger

    @classmethod
    def open(cls, config: PoolConfig, buffer: WritableBuffer) -> Self:
        """Takes up what an earlier process left, for `Pool.recovered`; raises LedgerUnfit."""
        ledger = cls(config, buffer)
        header = _header(config)
        if ledger._header[: len(header)] != header:
            raise LedgerUnfit("the ledger is of another pool, or of another version of kvharbor")
        return ledger

    @property
    def unrecorded_count(self) -> int:
        """Namespaces, contents and pins that the heap had no room for [L8]."""
        return self.cells.refused_count

    def close(self) -> None:
        """Lets go of the buffer, so that it can be unmapped."""
        self.records.close()
        self.cells.close()
        for column in (self._header, self.low_bytes):
            column.release()
        for numbers in (self.words, self.stamps):
            numbers.release()

    # State words

    def mark(self, blocks: Sequence[int], generation: Sequence[int], low_bits: int) -> None:
        """Stores the words of these blocks: their generations over the same low bits (session, held, state)."""
        words = self.words
        for block in blocks:
            words[block] = generation[block] << GENERATION_SHIFT | low_bits

    def mark_low(self, blocks: Sequence[int], low_bits: int) -> None:
        """Stores the lowest byte of words that keep their generation and belong to no session any more."""
        low_bytes = self.low_bytes
        for block in blocks:
            low_bytes[block] = low_bits

    def mark_released(self, blocks: Sequence[int], low_bits: int) -> None:
        """As `mark_low`, each word behind the next stamp [L3]."""
        low_bytes, stamps = self.low_bytes, self.stamps
        for stamp, block in enumerate(blocks, start=self.next_stamp):
            stamps[block] = stamp
            low_bytes[block] = low_bits
        self.next_stamp += len(blocks)


def _sizes(config: PoolConfig) -> tuple[int, ...]:
    """Returns the bytes of each column: words, stamps, cells, and those of the records."""
    ids = config.scratch_blocks + config.block_count
    return (8 * ids, 8 * ids, CELL_BYTES * (4096 + ids), *record_sizes(config))


def _rounded(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _header(config: PoolConfig) -> bytes:
    shape = (config.scratch_blocks, config.block_count, config.block_tokens)
    return _MAGIC + hashlib.sha256(repr(shape).encode() + config.identity).digest()
