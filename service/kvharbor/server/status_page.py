"""The status page of a pool: a few words of shared memory that schedulers read without a call (see side.proto)."""

import os
from typing import Self

from kvharbor.gpumem import HostArena
from kvharbor.pool import Pool

PAGE_BYTES = 4096
_VERSION = 1
_VERSION_WORD, _EPOCH, _REVISION, _AVAILABLE, _RECALLS, _WAITING = range(6)


class StatusPage:
    """Owns the page's memory file, which the keeper has too, and this process's mapping until `close` [S36].

    The file is sealed in size, and against more seals. Whoever reads it gets a descriptor that was opened for reading.
    """

    def __init__(self, arena: HostArena) -> None:
        self._arena = arena
        self._mapping = arena.map()
        self._words = memoryview(self._mapping.region).cast("Q")
        self._shown = (-1, -1, -1)
        self._is_closed = False

    @classmethod
    def made(cls, name: str, epoch: str) -> Self:
        """Makes the page of a new pool; `name` shows in /proc/PID/maps."""
        arena = HostArena.create(PAGE_BYTES, name=f"{name}-status")
        try:
            page = cls(arena)
        except BaseException:
            arena.close()
            raise
        page._words[_EPOCH] = int(epoch, 16)
        page._words[_VERSION_WORD] = _VERSION
        return page

    @classmethod
    def kept(cls, fd: int) -> Self:
        """Takes over the descriptor of a page that an earlier process has kept."""
        arena = HostArena.opened(fd, size_bytes=PAGE_BYTES)
        try:
            return cls(arena)
        except BaseException:
            arena.close()
            raise

    @property
    def fd(self) -> int:
        """The page's own descriptor, by which it can be written."""
        return self._arena.fd

    @property
    def recall_count(self) -> int:
        """Recalls so far, in the pool's life."""
        return self._words[_RECALLS]

    def recall(self) -> None:
        """Counts a recall."""
        self._words[_RECALLS] += 1

    def show(self, pool: Pool, waiting_count: int) -> None:
        """Shows how a pool stands, and how many calls wait for room."""
        shown, words = (pool.revision, pool.available_block_count, waiting_count), self._words
        if shown != self._shown and not self._is_closed:
            words[_REVISION], words[_AVAILABLE], words[_WAITING] = self._shown = shown

    def reading_descriptor(self) -> int:
        """Returns a new descriptor that can only be read by; the caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Lets go of the memory, which shows nothing new from then on."""
        self._is_closed = True
        self._words.release()
        self._mapping.close()
        self._arena.close()
