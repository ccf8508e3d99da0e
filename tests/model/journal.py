"""Every store into a ledger and into the blocks' memory, in order, so that a kill after any of them can be played."""

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

from workers import Stamp

from kvharbor.pool import Ledger

PIECE = 8
"""A long store may be cut between any two bytes; a few places tell as much."""


class Journal:
    """What was stored since the last `clear`, and what was there before."""

    def __init__(self, buffer: bytearray, describe: Callable[[], Any]) -> None:
        self.buffer = buffer
        self._describe = describe
        self._stores: list[tuple[int, bytes] | tuple[None, int, Stamp]] = []
        self._described: list[Any] = []
        self._base = bytes(buffer)
        self._memory: dict[int, Stamp] = {}

    def __len__(self) -> int:
        return len(self._stores)

    def clear(self, memory: dict[int, Stamp]) -> None:
        """Begins anew from what is there now."""
        self._stores.clear()
        self._described.clear()
        self._base, self._memory = bytes(self.buffer), dict(memory)

    def store(self, offset: int, data: bytes) -> None:
        """Notes a store into the ledger, and what the clients know at this moment."""
        self._stores.append((offset, data))
        self._described.append(self._describe())

    def write(self, block: int, stamp: Stamp) -> None:
        """Notes that a worker writes a block."""
        self._stores.append((None, block, stamp))
        self._described.append(None)

    def prefixes(self) -> Iterator[tuple[bytearray, dict[int, Stamp], Any]]:
        """Yields the ledger, the memory and the clients' knowledge as of a kill right after each store."""
        image, memory = bytearray(self._base), dict(self._memory)
        for store, described in zip(self._stores, self._described, strict=True):
            if store[0] is None:
                memory[store[1]] = store[2]
                continue
            image[store[0] : store[0] + len(store[1])] = store[1]
            yield bytearray(image), dict(memory), described


class WatchedMemory(dict[int, Stamp]):
    """The blocks' memory."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self._journal = journal

    def __setitem__(self, block: int, stamp: Stamp) -> None:
        super().__setitem__(block, stamp)
        self._journal.write(block, stamp)


class WatchedColumn:
    """A column of the ledger: one store an item, and a slice in pieces."""

    def __init__(self, view: memoryview, offset: int, step: int, journal: Journal) -> None:
        self._view, self._offset, self._step, self._journal = view, offset, step, journal

    def __len__(self) -> int:
        return len(self._view)

    def __getitem__(self, key: Any) -> Any:
        return self._view[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._view[key] = value
        if isinstance(key, slice):
            start, stop, _ = key.indices(len(self._view))
            data = self._view[start:stop].tobytes()
            for cut in range(0, len(data), PIECE):
                self._journal.store(self._offset + start * self._step + cut, data[cut : cut + PIECE])
        else:
            data = self._view[key : key + 1].tobytes()
            self._journal.store(self._offset + key * self._step, data)

    def tolist(self) -> list[int]:
        return self._view.tolist()


def watch(ledger: Ledger, journal: Journal) -> None:
    """Puts a column that tells the journal in place of each of a ledger's."""
    whole = memoryview(journal.buffer)
    base = _address(whole)
    for owner, names in (
        (ledger, ("words", "stamps")),
        (ledger.records, ("ages", "parents", "parent_ages", "_digests", "_contents", "_overflows")),
        (ledger.cells, ("_bytes", "_halves", "_words")),
    ):
        for name in names:
            view: memoryview = getattr(owner, name)
            setattr(owner, name, WatchedColumn(view, _address(view) - base, view.itemsize, journal))
    low_bytes, words = ledger.low_bytes, ledger.words
    ledger.low_bytes = WatchedColumn(low_bytes, words._offset, 8, journal)  # type: ignore[attr-defined, assignment]


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
