"""The status page of a pool: a few words of shared memory that schedulers read without a call (see side.proto)."""

import os
import stat
from typing import Self

from kvharbor.gpumem import HostArena
from kvharbor.pool import Pool

PAGE_BYTES = 4096
_VERSION = 1
_VERSION_WORD, _EPOCH, _REVISION, _AVAILABLE, _RECALLS, _WAITING = range(6)


class StatusPage:
    """Owns the page's memory file, which the keeper has too, and this process's mapping until `close` [S36].

    The file is sealed in size, and against more seals. Whoever reads it gets a descriptor that was opened for reading,
    and the file's mode keeps those without its owner's rights from opening another one to write. What is written there
    all the same is not read here, but for how many recalls there were with the process before.
    """

    def __init__(self, arena: HostArena, epoch: str) -> None:
        self._arena = arena
        self._mapping = arena.map()
        self._words = memoryview(self._mapping.region).cast("Q")
        self._epoch = int(epoch, 16)
        self._recall_count = self._words[_RECALLS]
        self._shown = (0, 0, 0)
        self._is_closed = False

    @classmethod
    def made(cls, name: str, epoch: str) -> Self:
        """Makes the page of a new pool; `name` shows in /proc/PID/maps."""
        arena = HostArena.create(PAGE_BYTES, name=f"{name}-status")
        try:
            os.fchmod(arena.fd, stat.S_IRUSR)
            page = cls(arena, epoch)
        except BaseException:
            arena.close()
            raise
        page._write()
        return page

    @classmethod
    def kept(cls, fd: int, epoch: str) -> Self:
        """Takes over the descriptor of a page that an earlier process has kept."""
        arena = HostArena.opened(fd, size_bytes=PAGE_BYTES)
        try:
            return cls(arena, epoch)
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
        return self._recall_count

    def recall(self) -> None:
        """Counts a recall."""
        self._recall_count = (self._recall_count + 1) % 2**64
        self._write()

    def show(self, pool: Pool, waiting_count: int) -> None:
        """Shows how a pool stands, and how many calls wait for room."""
        shown = (pool.revision, pool.available_block_count, waiting_count)
        if shown != self._shown:
            self._shown = shown
            self._write()

    def _write(self) -> None:
        if not self._is_closed:
            words = self._words
            words[_VERSION_WORD], words[_EPOCH], words[_RECALLS] = _VERSION, self._epoch, self._recall_count
            words[_REVISION], words[_AVAILABLE], words[_WAITING] = self._shown

    def reading_descriptor(self) -> int:
        """Returns a new descriptor that can only be read by; the caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Lets go of the memory, which shows nothing new from then on."""
        self._is_closed = True
        self._words.release()
        self._mapping.close()
        self._arena.close()
