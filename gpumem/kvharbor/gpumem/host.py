"""The host arena: one anonymous memory file, sealed in size [M5], reserved before anybody maps it."""

import fcntl
import mmap
import os
from collections.abc import Callable
from types import TracebackType
from typing import ClassVar, Self

from kvharbor.gpumem.arena import ArenaKind, Export
from kvharbor.gpumem.errors import ArenaClosed, LayoutInvalid, ReservationCancelled
from kvharbor.gpumem.mapping import Mapping
from kvharbor.gpumem.room import require_room

PIECE_BYTES = 64 * 2**20
MAX_FILE_BYTES = 2**62
# The last seal also keeps clients from sealing: F_SEAL_FUTURE_WRITE by one would bar all later writers.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def headroom_bytes(size_bytes: int) -> int:
    """Bytes that must stay free beside a reservation: the kernel's bookkeeping, and this process's own."""
    return 16 * 2**20 + size_bytes // 128


class HostArena:
    """Owns a memfd of `memory_max_bytes` of which the first `size_bytes` are for use.

    The arena owns `fd` and closes it in `close`; send duplicates (SCM_RIGHTS makes one) and let the arena
    live as long as new clients may come. The memory itself lives until the last descriptor and mapping of it
    is gone. Fresh memory reads as zeros [P6].
    """

    kind: ClassVar[ArenaKind] = ArenaKind.HOST

    def __init__(self, fd: int, *, size_bytes: int, memory_max_bytes: int) -> None:
        self._fd: int | None = fd
        self.size_bytes = size_bytes
        self.memory_max_bytes = memory_max_bytes
        self.reserved_bytes = 0

    @classmethod
    def create(cls, size_bytes: int, *, memory_max_bytes: int | None = None, name: str = "kvharbor") -> Self:
        """Makes the file, its size sealed at `memory_max_bytes` (default `size_bytes`); takes no memory.

        `name` shows in /proc/PID/maps as "memfd:NAME". Sizes are rounded up to whole pages in the file.
        """
        most = size_bytes if memory_max_bytes is None else memory_max_bytes
        if not 1 <= size_bytes <= most <= MAX_FILE_BYTES:
            limit = f"from 1 to memory_max_bytes ({most}), at most {MAX_FILE_BYTES}"
            raise LayoutInvalid("size_bytes", size_bytes, limit, "ask for a size within it")
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, -(-most // mmap.PAGESIZE) * mmap.PAGESIZE)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, size_bytes=size_bytes, memory_max_bytes=most)

    @classmethod
    def opened(cls, fd: int, *, size_bytes: int) -> Self:
        """Takes over the descriptor of an arena of `size_bytes` that another process has made and reserved."""
        arena = cls(fd, size_bytes=size_bytes, memory_max_bytes=os.fstat(fd).st_size)
        arena.reserved_bytes = size_bytes
        return arena

    @property
    def fd(self) -> int:
        """The descriptor, owned by the arena. Raises ArenaClosed after `close`."""
        if self._fd is None:
            raise ArenaClosed("arena")
        return self._fd

    def reserve(
        self,
        progress: Callable[[int], None] | None = None,
        *,
        cancelled: Callable[[], bool] | None = None,
        check_room: Callable[[int, int], None] = require_room,
    ) -> None:
        """Takes the memory of `size_bytes`, piece by piece; blocks, so keep it off an event loop.

        `progress` gets the bytes reserved so far after each piece. Raises InsufficientMemory before the
        first byte when there is no room for all of it with some headroom, and between pieces when others
        have taken the room meanwhile [M4]; ReservationCancelled when `cancelled()` is true before a piece.
        What is reserved by then stays reserved until `close`. Calling again goes on where it stopped.
        `check_room(needed_bytes, headroom_bytes)` raises where there is no room.
        """
        remaining_bytes = self.size_bytes - self.reserved_bytes
        check_room(remaining_bytes, headroom_bytes(remaining_bytes))
        while self.reserved_bytes < self.size_bytes:
            if cancelled is not None and cancelled():
                raise ReservationCancelled(self.reserved_bytes, size_bytes=self.size_bytes)
            # The headroom was asked for at the start; from here on it is what the kernel eats into.
            check_room(self.size_bytes - self.reserved_bytes, 0)
            piece_bytes = min(PIECE_BYTES, self.size_bytes - self.reserved_bytes)
            os.posix_fallocate(self.fd, self.reserved_bytes, piece_bytes)
            self.reserved_bytes += piece_bytes
            if progress is not None:
                progress(self.reserved_bytes)

    def export(self) -> Export:
        """Returns what another process needs to map the arena; the descriptor in it is the arena's."""
        return Export(ArenaKind.HOST, self.size_bytes, fds=(self.fd,))

    def map(self, *, writable: bool = True) -> Mapping:
        """Maps the arena in this process; the mapping is the caller's to close and may outlive the arena."""
        return Mapping.attach(self.export(), writable=writable)

    def close(self) -> None:
        """Closes the descriptor; repeated calls do nothing. Mappings, here and elsewhere, stay valid."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
