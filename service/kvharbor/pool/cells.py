"""Things of any length in the ledger: a heap of cells of equal size, each thing a chain of them.

A cell is 128 bytes: kind, length, CRC and next as uint32, two words as uint64, 96 bytes of payload. Only the head
of a chain has a kind. All integers are in the machine's own order, as the heap never leaves its host.

[L7] The head's kind is stored last, once everything else of the chain is there; one store of 0 frees the whole
chain. So a chain is there or not, whatever the instant of a kill. The two words of a head may be stored anew at any
time, each by one store; they are outside the CRC.

[L8] A heap that is full refuses: `write` returns NO_CELL and counts it. What is not recorded is a miss after a
restart, and nothing else breaks.
"""

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

CELL_BYTES: Final = 128
NO_CELL: Final = 0

_HALVES = CELL_BYTES // 4
_WORDS = CELL_BYTES // 8
_KIND, _LENGTH, _CRC, _NEXT = range(4)
_FIRST_WORD = 2
_PAYLOAD = 32
_PAYLOAD_BYTES = CELL_BYTES - _PAYLOAD


class CellKind(IntEnum):
    """What the head of a chain says that the chain is."""

    NAMESPACE = 1  # words: root node, whether it is retired
    EXTRAS = 2  # the part of a block's content behind its tokens
    PIN = 3  # words: tail, end of its time


@dataclass(frozen=True, slots=True)
class Entry:
    """One chain as it was found. `words` are the two words of its head."""

    cell: int
    kind: int
    value: bytes
    words: tuple[int, int]


class Cells:
    """The heap. Cell 0 is never used for a chain: its first word says how many cells were ever touched."""

    def __init__(self, memory: memoryview) -> None:
        self._bytes = memory
        self._halves = memory.cast("I")
        self._words = memory.cast("Q")
        self._count = len(memory) // CELL_BYTES
        # Cells from here on were never touched; those below are in a chain or in the list.
        self._touched = max(1, self._words[0])
        self._free: list[int] = []
        self.refused_count = 0

    def close(self) -> None:
        """Lets go of the memory."""
        self._halves.release()
        self._words.release()
        self._bytes.release()

    def write(self, kind: CellKind, value: bytes, words: tuple[int, int] = (0, 0)) -> int:
        """Stores a value and returns the head of its chain, or NO_CELL if there is no room."""
        pieces = [value[start : start + _PAYLOAD_BYTES] for start in range(0, len(value), _PAYLOAD_BYTES)] or [b""]
        cells = self._take(len(pieces))
        if not cells:
            self.refused_count += 1
            return NO_CELL
        following = NO_CELL
        for cell, piece in zip(reversed(cells), reversed(pieces), strict=True):
            start = cell * CELL_BYTES + _PAYLOAD
            self._bytes[start : start + len(piece)] = piece
            self._halves[cell * _HALVES + _NEXT] = following
            following = cell
        head = cells[0]
        self._words[head * _WORDS + _FIRST_WORD] = words[0]
        self._words[head * _WORDS + _FIRST_WORD + 1] = words[1]
        self._halves[head * _HALVES + _LENGTH] = len(value)
        self._halves[head * _HALVES + _CRC] = _crc(kind, value)
        self._halves[head * _HALVES + _KIND] = kind
        return head

    def set_word(self, cell: int, index: int, word: int) -> None:
        """Replaces the first (0) or second (1) word of a chain's head."""
        self._words[cell * _WORDS + _FIRST_WORD + index] = word

    def free(self, cell: int) -> None:
        """Ends a chain."""
        self._halves[cell * _HALVES + _KIND] = 0
        while cell != NO_CELL:
            self._free.append(cell)
            cell = self._halves[cell * _HALVES + _NEXT]

    def read(self, cell: int) -> Entry | None:
        """Returns the chain that begins at a cell; None if there is none, or a scribbled one."""
        chain = self._chain(cell)
        if not chain:
            return None
        head = cell * _HALVES
        kind, length = self._halves[head + _KIND], self._halves[head + _LENGTH]
        value = b"".join(self._payload(each) for each in chain)[:length]
        if len(value) != length or _crc(kind, value) != self._halves[head + _CRC]:
            return None
        first = cell * _WORDS + _FIRST_WORD
        return Entry(cell, kind, value, (self._words[first], self._words[first + 1]))

    def entries(self) -> Iterator[Entry]:
        """Yields every whole chain that an earlier process left."""
        for cell in range(1, min(self._touched, self._count)):
            entry = self.read(cell) if self._halves[cell * _HALVES + _KIND] else None
            if entry is not None:
                yield entry

    def keep_only(self, kept: Iterable[int]) -> None:
        """Frees all chains but those of these heads: the first thing to do with what another process left."""
        heads = set(kept)
        used = {cell for head in heads for cell in self._chain(head)}
        self._touched = min(self._touched, self._count)
        self._free = [cell for cell in range(self._touched - 1, 0, -1) if cell not in used]
        for cell in range(1, self._touched):
            if cell not in heads and self._halves[cell * _HALVES + _KIND]:
                self._halves[cell * _HALVES + _KIND] = 0

    def _take(self, count: int) -> list[int]:
        fresh = count - len(self._free)
        if fresh > self._count - self._touched:
            return []
        if fresh > 0:
            self._free += range(self._touched + fresh - 1, self._touched - 1, -1)
            self._touched += fresh
            self._words[0] = self._touched
        return [self._free.pop() for _ in range(count)]

    def _chain(self, head: int) -> list[int]:
        """Returns the cells of a chain; empty if they cannot be one."""
        if not (1 <= head < self._count and self._halves[head * _HALVES + _KIND]):
            return []
        wanted = max(1, -(-self._halves[head * _HALVES + _LENGTH] // _PAYLOAD_BYTES))
        chain: list[int] = []
        cell = head
        while 1 <= cell < self._count and len(chain) < wanted:
            chain.append(cell)
            cell = self._halves[cell * _HALVES + _NEXT]
        return chain if len(chain) == wanted and cell == NO_CELL else []

    def _payload(self, cell: int) -> bytes:
        start = cell * CELL_BYTES + _PAYLOAD
        return self._bytes[start : start + _PAYLOAD_BYTES].tobytes()


def _crc(kind: int, value: bytes) -> int:
    return zlib.crc32(value, kind)
