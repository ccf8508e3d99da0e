"""What of a pool outlives its process: shared memory that the next process recovers the pool from.

Per block there are a state word, a stamp and a record; things of any length are in `cells.py`. A kill may come
between any two stores and in the middle of any long one, so a word is what decides, and it is one aligned store of
eight bytes: it is there or not.

    word    generation << 27 | session << 3 | held << 2 | state      (state: FREE, RESERVED, COMMITTED, SHADOW)
    stamp   place in the order of release, of a COMMITTED block that nobody holds
    record  generation it is for, generation of its parent, checksum, parent node, tokens or opaque key, cell of its
            extra keys

A word of 0 is a block that was never used: generation 1, FREE. The session of a COMMITTED word means nothing, so to
commit, to hold and to release is one store of the word's lowest byte. The record is immutable while the word is
COMMITTED or SHADOW. Its checksum is the block's digest, which covers namespace, prefix and content; recovery has to
compute it anyway. An opaque key is a digest that covers nothing we know: there the checksum is SHA-256 of parent node
and key. Generations and parents are checked against the words. Whether a record has tokens or an opaque key is known
by its namespace; the shorter of the two is padded.

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
from array import array
from collections.abc import Callable, Sequence
from mmap import mmap
from typing import Final, Self

from kvharbor.pool.cells import CELL_BYTES, NO_CELL, CellKind, Cells
from kvharbor.pool.digest import DIGEST_BYTES, OPAQUE_KEY_BYTES
from kvharbor.pool.results import PoolConfig
from kvharbor.pool.runs import run_end

WritableBuffer = bytearray | memoryview | mmap

HELD: Final = 1 << 2
STATE_MASK: Final = HELD - 1
SESSION_SHIFT: Final = 3
GENERATION_SHIFT: Final = 27
MAX_SESSION: Final = (1 << (GENERATION_SHIFT - SESSION_SHIFT)) - 1
"""A pool cannot tell more sessions apart than this, over its whole epoch."""

_MAGIC: Final = b"kvharbor ledger 2"
_PAGE: Final = 4096
_PARENT_BYTES: Final = 8
# The heap was full when the block was published: after a restart it is a miss.
_UNRECORDED: Final = (1 << 32) - 1


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
        self._ages = columns[2].cast("Q")
        self._parent_ages = columns[3].cast("Q")
        self._checksums = columns[4]
        self._keys = columns[5]
        self._overflows = columns[6].cast("I")
        self.cells = Cells(columns[7])
        self._exact_key_bytes = _PARENT_BYTES + 4 * config.block_tokens
        self._stored_key_bytes = _stored_key_bytes(config)
        # Blocks with extra keys in cells.
        self._overflowing: set[int] = set()
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
        self.cells.close()
        for column in (self._header, self.low_bytes, self._checksums, self._keys):
            column.release()
        for numbers in (self.words, self.stamps, self._ages, self._parent_ages, self._overflows):
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

    # Records

    def record(
        self,
        blocks: list[int],
        keys: list[bytes],
        digests: list[bytes],
        generation: list[int],
        parent_age: int,
        is_opaque: bool = False,
    ) -> None:
        """Stores what a chain of blocks holds; their words follow [L2].

        A key is the parent node as eight bytes, then the content. `parent_age` is the generation of the first
        block's parent; 0 below a root.
        """
        joined, size, whole = b"".join(keys), self._stored_key_bytes, self._key_bytes(is_opaque)
        if size != whole or len(joined) != size * len(keys):
            if len(joined) != whole * len(keys):
                for block, key in zip(blocks, keys, strict=True):
                    if len(key) != whole:
                        self._record_extras(block, key[whole:])
            joined = b"".join([key[:whole].ljust(size, b"\0") for key in keys])
        checksums = b"".join(self.checksums(keys, digests, is_opaque))
        start = 0
        while start < len(blocks):
            first, end = blocks[start], run_end(blocks, start)
            last = first + end - start
            ages = array("Q", generation[first:last])
            self._ages[first:last] = ages
            self._parent_ages[first] = parent_age
            self._parent_ages[first + 1 : last] = ages[:-1]
            self._checksums[first * DIGEST_BYTES : last * DIGEST_BYTES] = checksums[
                start * DIGEST_BYTES : end * DIGEST_BYTES
            ]
            self._keys[first * size : last * size] = joined[start * size : end * size]
            start, parent_age = end, ages[-1]

    def erase(self, blocks: Sequence[int]) -> None:
        """Gives back the cells of blocks whose words say FREE by now [L4]."""
        if self._overflowing:
            for block in self._overflowing.intersection(blocks):
                self._erase_extras(block)

    def keys(self, blocks: Sequence[int], generation: Sequence[int]) -> list[bytes | None]:
        """Returns the keys that were recorded for blocks of these generations; None where there is no whole one.

        They may be padded: `trimmed` has them as they were.
        """
        ages, overflows, keys, size = self._ages, self._overflows, self._keys, self._stored_key_bytes
        found: list[bytes | None] = []
        for block in blocks:
            key = None
            if ages[block] == generation[block]:
                key = keys[block * size : (block + 1) * size].tobytes()
                if overflows[block] != NO_CELL:
                    key = self._with_extras(key, overflows[block])
            found.append(key)
        return found

    def trimmed(self, key: bytes, is_opaque: bool) -> bytes:
        """Returns one of `keys` without what it may be padded with."""
        whole, size = self._key_bytes(is_opaque), self._stored_key_bytes
        return key if whole == size else key[:whole] + key[size:]

    def key(self, block: int, generation: Sequence[int], is_opaque: bool) -> bytes | None:
        """Returns the key that was recorded for a block of this generation, if there is a whole one."""
        key = self.keys((block,), generation)[0]
        return None if key is None else self.trimmed(key, is_opaque)

    def parent_age(self, block: int) -> int:
        """Returns the recorded generation of a block's parent; 0 below a root."""
        return self._parent_ages[block]

    def checksum(self, block: int) -> bytes:
        """Returns the recorded checksum of a block."""
        return self._checksums[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES].tobytes()

    def checksums(self, keys: Sequence[bytes], digests: Sequence[bytes], is_opaque: bool) -> Sequence[bytes]:
        """Returns the checksums that records of these keys and digests have."""
        return [hashlib.sha256(key).digest() for key in keys] if is_opaque else digests

    def is_unrecorded(self, block: int) -> bool:
        """Whether the heap was full when the block was published."""
        return self._overflows[block] == _UNRECORDED

    def take_extras(self, is_valid: Callable[[int], bool]) -> list[int]:
        """After a restart: takes up the cells of blocks with a valid record, returned, and forgets the others'."""
        for block, cell in enumerate(self._overflows.tolist()):
            if cell != NO_CELL:
                if is_valid(block):
                    self._overflowing.add(block)
                else:
                    self._overflows[block] = NO_CELL
        return self.extras_cells()

    def extras_cells(self) -> list[int]:
        """Returns the heads of all cells with extra keys."""
        return [self._overflows[block] for block in self._overflowing if not self.is_unrecorded(block)]

    def _key_bytes(self, is_opaque: bool) -> int:
        """Returns the size of a key without extra keys."""
        return _PARENT_BYTES + OPAQUE_KEY_BYTES if is_opaque else self._exact_key_bytes

    def _with_extras(self, key: bytes, cell: int) -> bytes | None:
        extras = self.cells.read(cell)
        return key + extras.value if extras is not None and extras.kind == CellKind.EXTRAS else None

    def _record_extras(self, block: int, extras: bytes) -> None:
        cell = self.cells.write(CellKind.EXTRAS, extras)
        self._overflows[block] = _UNRECORDED if cell == NO_CELL else cell
        self._overflowing.add(block)

    def _erase_extras(self, block: int) -> None:
        cell = self._overflows[block]
        self._overflows[block] = NO_CELL
        self._overflowing.discard(block)
        if cell != _UNRECORDED:
            self.cells.free(cell)


def _sizes(config: PoolConfig) -> tuple[int, ...]:
    """Returns the bytes of each column: words, stamps, ages, ages of parents, checksums, keys, overflows, cells."""
    ids = config.scratch_blocks + config.block_count
    key_bytes = _stored_key_bytes(config)
    cells = 4096 + ids
    return (8 * ids, 8 * ids, 8 * ids, 8 * ids, DIGEST_BYTES * ids, key_bytes * ids, 4 * ids, CELL_BYTES * cells)


def _stored_key_bytes(config: PoolConfig) -> int:
    """Returns the room of a key: the parent node, then tokens or an opaque key."""
    return _PARENT_BYTES + max(4 * config.block_tokens, OPAQUE_KEY_BYTES)


def _rounded(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _header(config: PoolConfig) -> bytes:
    shape = (config.scratch_blocks, config.block_count, config.block_tokens)
    return _MAGIC + hashlib.sha256(repr(shape).encode() + config.identity).digest()
