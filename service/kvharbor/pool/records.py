"""The records of a ledger: what each block was committed for. The tree reads contents and digests from here.

Per block: generation it is for, parent node and that one's generation, digest, content, cell of its extra keys. In an
exact namespace the content is the block's tokens, and its digest vouches for the record: it covers namespace, prefix
and content. In an opaque one the digest is the key that callers have computed, which covers nothing that we know; there
SHA-256 of parent node and key stands in the place of the tokens. Generations and parents are checked against the
words. Which of the two a record is follows from its namespace; what is shorter than its place is padded.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from struct import Struct
from typing import Final

from kvharbor.pool.cells import NO_CELL, CellKind, Cells
from kvharbor.pool.digest import DIGEST_BYTES
from kvharbor.pool.results import PoolConfig
from kvharbor.pool.runs import run_end

# The heap was full when the block was published: after a restart it is a miss.
_UNRECORDED: Final = (1 << 32) - 1
_DIGEST: Final = Struct(f"{DIGEST_BYTES}s")
_PARENT: Final = Struct("<Q")


def record_sizes(config: PoolConfig) -> tuple[int, ...]:
    """Returns the bytes of each column: ages, parents, ages of parents, digests, contents, overflows."""
    ids = config.scratch_blocks + config.block_count
    return (8 * ids, 8 * ids, 8 * ids, DIGEST_BYTES * ids, _content_room(config) * ids, 4 * ids)


class Records:
    """The columns of a ledger's records, on its memory.

    What is recorded of a block stays until it is given out again, and nobody else writes here: what the tree has read
    once is true as long as the block is in it.
    """

    def __init__(self, config: PoolConfig, columns: Sequence[memoryview], cells: Cells) -> None:
        self.ages = columns[0].cast("Q")
        self.parents = columns[1].cast("Q")
        self.parent_ages = columns[2].cast("Q")
        self._digests = columns[3]
        # The quickest way to read one.
        self._digest_at = partial(_DIGEST.unpack_from, columns[3])
        self._contents = columns[4]
        self._overflows = columns[5].cast("I")
        self._cells = cells
        self.block_bytes = 4 * config.block_tokens
        self._room = _content_room(config)
        # Blocks with extra keys in cells.
        self._overflowing: set[int] = set()

    def close(self) -> None:
        """Lets go of the memory."""
        for column in (self._digests, self._contents):
            column.release()
        for numbers in (self.ages, self.parents, self.parent_ages, self._overflows):
            numbers.release()

    def write(
        self,
        blocks: list[int],
        parent: int,
        contents: Sequence[bytes],
        digests: Sequence[bytes],
        generation: list[int],
        parent_age: int,
        *,
        is_opaque: bool,
    ) -> None:
        """Stores what a chain of blocks below `parent` holds; their words follow [L2].

        A content is tokens, then extra keys, or an opaque key. `parent_age` is the parent's generation, 0 of a root.
        """
        stored = _checks(blocks, parent, contents) if is_opaque else contents
        joined, digest_bytes = b"".join(stored), b"".join(digests)
        size, room = self.content_bytes(is_opaque=is_opaque), self._room
        if len(joined) != size * len(blocks):
            for block, content in zip(blocks, contents, strict=True):
                if len(content) > size:
                    self._write_extras(block, content[size:])
            joined = b"".join([content[:size] for content in contents])
        if size != room:
            joined = b"".join([joined[at : at + size].ljust(room, b"\0") for at in range(0, len(joined), size)])
        start = 0
        while start < len(blocks):
            first, end = blocks[start], run_end(blocks, start)
            last = first + end - start
            ages = array("Q", generation[first:last])
            self.ages[first:last] = ages
            self.parents[first] = parent
            self.parents[first + 1 : last] = array("Q", blocks[start : end - 1])
            self.parent_ages[first] = parent_age
            self.parent_ages[first + 1 : last] = ages[:-1]
            self._digests[first * DIGEST_BYTES : last * DIGEST_BYTES] = digest_bytes[
                start * DIGEST_BYTES : end * DIGEST_BYTES
            ]
            self._contents[first * room : last * room] = joined[start * room : end * room]
            start, parent, parent_age = end, blocks[end - 1], ages[-1]

    def erase(self, blocks: Sequence[int]) -> None:
        """Gives back the cells of blocks whose words say FREE by now [L4]."""
        if self._overflowing:
            for block in self._overflowing.intersection(blocks):
                self._erase_extras(block)

    def content_bytes(self, *, is_opaque: bool) -> int:
        """Returns the size of a content, without extra keys."""
        return DIGEST_BYTES if is_opaque else self.block_bytes

    def digest(self, block: int) -> bytes:
        """Returns the digest of a block."""
        digest: bytes = self._digest_at(block * DIGEST_BYTES)[0]
        return digest

    def digests(self, blocks: Iterable[int]) -> list[bytes]:
        """Returns the digests of blocks."""
        digest_at = self._digest_at
        return [digest_at(block * DIGEST_BYTES)[0] for block in blocks]

    def all_digests(self) -> bytes:
        """Returns the digests of all blocks, joined."""
        return self._digests[:].tobytes()

    def content(self, block: int, *, is_opaque: bool) -> bytes:
        """Returns what a block was committed for, without extra keys."""
        if is_opaque:
            return self.digest(block)
        start = block * self._room
        return self._contents[start : start + self.block_bytes].tobytes()

    def common_count(self, blocks: list[int], contents: bytes, *, is_opaque: bool) -> int:
        """Returns how many leading ones of these blocks hold these contents: as many, joined, without extra keys."""
        return _common_count(self._joined(blocks, is_opaque=is_opaque), contents, len(blocks))

    # What was recorded, as it may be after a restart

    def recorded(self, block: int, generation: Sequence[int], *, is_opaque: bool) -> bytes | None:
        """Returns the content that was recorded for a block of this generation; None if there is no whole one.

        Nothing vouches for it yet.
        """
        extras = self._stored_extras(block) if self.ages[block] == generation[block] else None
        return None if extras is None else self.content(block, is_opaque=is_opaque) + extras

    def all_recorded(self, blocks: list[int], *, is_opaque: bool) -> list[bytes]:
        """Returns what `recorded` does, for blocks that have a whole record."""
        size, joined = self.content_bytes(is_opaque=is_opaque), self._joined(blocks, is_opaque=is_opaque)
        found = [joined[at : at + size] for at in range(0, len(joined), size)]
        if not self._overflowing.isdisjoint(blocks):
            found = [one + (self._stored_extras(block) or b"") for block, one in zip(blocks, found, strict=True)]
        return found

    def not_whole(self, blocks: Iterable[int], generation: Sequence[int]) -> list[int]:
        """Returns those of these blocks that have no whole record of this generation."""
        ages, overflowing = self.ages.tolist(), self._overflowing
        return [
            block
            for block in blocks
            if ages[block] != generation[block] or (block in overflowing and self._stored_extras(block) is None)
        ]

    def vouched_count(
        self, blocks: list[int], parent: int, contents: Sequence[bytes], digests: Sequence[bytes], *, is_opaque: bool
    ) -> int:
        """Returns how many leading ones of a chain's records are whole, given what its digests would have to be."""
        if not is_opaque:
            return _common_count(self._joined(blocks, is_opaque=True), b"".join(digests), len(blocks))
        room = self._room
        for place, (block, check) in enumerate(zip(blocks, _checks(blocks, parent, contents), strict=True)):
            if self._contents[block * room : block * room + len(check)] != check:
                return place
        return len(blocks)

    def is_unrecorded(self, block: int) -> bool:
        """Whether the heap was full when the block was published."""
        return self._overflows[block] == _UNRECORDED

    def take_up_extras(self) -> None:
        """After a restart, before anything else: finds the blocks that have extra keys."""
        self._overflowing = {block for block, cell in enumerate(self._overflows.tolist()) if cell != NO_CELL}

    def keep_extras(self, is_valid: Callable[[int], bool]) -> list[int]:
        """After that: forgets the extra keys of all blocks but those with a valid record; returns their cells."""
        for block in [block for block in self._overflowing if not is_valid(block)]:
            self._overflows[block] = NO_CELL
            self._overflowing.discard(block)
        return self.extras_cells()

    def extras_cells(self) -> list[int]:
        """Returns the heads of all cells with extra keys."""
        return [self._overflows[block] for block in self._overflowing if not self.is_unrecorded(block)]

    def _joined(self, blocks: list[int], *, is_opaque: bool) -> bytes:
        """Returns the contents of blocks without extra keys, joined."""
        column, room = (self._digests, DIGEST_BYTES) if is_opaque else (self._contents, self._room)
        parts = []
        start = 0
        while start < len(blocks):
            first, end = blocks[start], run_end(blocks, start)
            parts.append(column[first * room : (first + end - start) * room])
            start = end
        joined, size = b"".join(parts), self.content_bytes(is_opaque=is_opaque)
        return joined if size == room else b"".join([joined[at : at + size] for at in range(0, len(joined), room)])

    def _write_extras(self, block: int, extras: bytes) -> None:
        cell = self._cells.write(CellKind.EXTRAS, extras)
        self._overflows[block] = _UNRECORDED if cell == NO_CELL else cell
        self._overflowing.add(block)

    def _stored_extras(self, block: int) -> bytes | None:
        """Returns the extra keys of a block as the heap has them; None if it should have some and has not."""
        cell = self._overflows[block]
        if cell == NO_CELL:
            return b""
        entry = self._cells.read(cell)
        return entry.value if entry is not None and entry.kind == CellKind.EXTRAS else None

    def _erase_extras(self, block: int) -> None:
        cell = self._overflows[block]
        self._overflows[block] = NO_CELL
        self._overflowing.discard(block)
        if cell != _UNRECORDED:
            self._cells.free(cell)


def _checks(blocks: Sequence[int], parent: int, keys: Sequence[bytes]) -> list[bytes]:
    """Returns what vouches for the records of a chain with these opaque keys."""
    parents = (parent, *blocks[:-1])
    return [hashlib.sha256(_PARENT.pack(one) + key).digest() for one, key in zip(parents, keys, strict=True)]


def _common_count(ours: bytes, theirs: bytes, count: int) -> int:
    """Returns how many leading ones of `count` things of equal size are the same in both."""
    if ours == theirs:
        return count
    size = len(ours) // count
    least, most = 0, count - 1
    while least < most:
        middle = (least + most + 1) // 2
        if ours[least * size : middle * size] == theirs[least * size : middle * size]:
            least = middle
        else:
            most = middle - 1
    return least


def _content_room(config: PoolConfig) -> int:
    return max(4 * config.block_tokens, DIGEST_BYTES)
