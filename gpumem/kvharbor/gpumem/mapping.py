"""The attach side of a host arena: its memory at a fixed address range of this process.

The range is reserved first, by an anonymous mmap without a file descriptor, and the arena is then placed
over it with MAP_FIXED. Placing another arena over the same range is the same call, so views made from a
mapping can outlive the memory under them; and no descriptor keeps the old memory alive [M9].
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import threading
from types import TracebackType
from typing import ClassVar, Self

import numpy as np

from kvharbor.gpumem.arena import ArenaKind, Export
from kvharbor.gpumem.errors import ArenaClosed, ArenaUnfit, MappingInUse

_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value
_REQUIRED_SEALS = fcntl.F_SEAL_SHRINK


class Mapping:
    """`size_bytes` of an arena, mapped shared. Made by `attach`; owned by its maker until `close`.

    A forked child does not inherit the memory (MADV_DONTFORK) [M7]: it could go on writing after its parent is
    known to be dead. Touching the mapping there is a SIGSEGV.
    """

    kind: ClassVar[ArenaKind] = ArenaKind.HOST

    def __init__(self, region: mmap.mmap, *, size_bytes: int, writable: bool) -> None:
        self._region: mmap.mmap | None = region
        self._placing = threading.Lock()
        self.size_bytes = size_bytes
        self.writable = writable

    @classmethod
    def attach(cls, export: Export, *, writable: bool = True) -> Self:
        """Maps the first `size_bytes` of a host arena, whose descriptor stays the caller's and may be closed.

        Raises ArenaUnfit when the export is not one of a host arena, or its descriptor is no memfd, can shrink under
        the mapping, is shorter than `size_bytes`, or allows reading only where `writable` is asked for: each of these
        would otherwise be a SIGBUS or SIGSEGV later [M6].
        """
        size_bytes = export.size_bytes
        fd = _fit_descriptor(export)
        # The placeholder is always writable, so that torch takes its buffer without a warning; what may be
        # stored is decided by the protection, and `buffer` is read-only where the memory is.
        region = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            _place(fd, region, size_bytes, writable=writable)
        except BaseException:
            region.close()
            raise
        return cls(region, size_bytes=size_bytes, writable=writable)

    def vacate(self) -> None:
        """Lets go of the arena's memory while views live: a placeholder takes its range, which reads as zeros [M11].

        The caller asserts that nothing is at work on the memory. What is stored meanwhile is lost. Raises
        ArenaClosed.
        """
        with self._placing:
            _place(-1, self.region, self.size_bytes, writable=True)

    def replace(self, export: Export) -> None:
        """Puts another arena in the place of what is mapped, so that existing views show it [M11].

        Its descriptor stays the caller's. Raises ArenaUnfit as `attach` does, with what was mapped still there, and
        also unless it has this mapping's size; ArenaClosed.
        """
        if export.size_bytes != self.size_bytes:
            raise ArenaUnfit(f"the other arena has {export.size_bytes}", size_bytes=self.size_bytes)
        fd = _fit_descriptor(export)
        with self._placing:
            _place(fd, self.region, self.size_bytes, writable=self.writable)

    @property
    def buffer(self) -> memoryview:
        """A new memoryview of the bytes, read-only for a read-only mapping. It keeps `close` from working."""
        view = memoryview(self.region)
        return view if self.writable else view.toreadonly()

    @property
    def region(self) -> mmap.mmap:
        """The raw region for code that cannot take read-only buffers (torch).

        A store into a read-only mapping through it ends the process with SIGSEGV. Raises ArenaClosed.
        """
        if self._region is None:
            raise ArenaClosed("mapping")
        return self._region

    def close(self) -> None:
        """Unmaps the memory; repeated calls do nothing. Raises MappingInUse while any view is alive [M8]."""
        with self._placing:
            if self._region is None:
                return
            try:
                self._region.close()
            except BufferError:
                raise MappingInUse(self.size_bytes) from None
            self._region = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _fit_descriptor(export: Export) -> int:
    size_bytes = export.size_bytes
    if export.kind is not ArenaKind.HOST or len(export.fds) != 1:
        raise ArenaUnfit(f"it is {export.kind} memory with {len(export.fds)} descriptors", size_bytes=size_bytes)
    if size_bytes < 1:
        raise ArenaUnfit("a mapping has at least one byte", size_bytes=size_bytes)
    (fd,) = export.fds
    file_bytes = os.fstat(fd).st_size
    if file_bytes < size_bytes:
        raise ArenaUnfit(f"it has {file_bytes}", size_bytes=size_bytes)
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as failure:
        if failure.errno != errno.EINVAL:
            raise
        raise ArenaUnfit("it is not a memfd", size_bytes=size_bytes) from None
    if seals & _REQUIRED_SEALS != _REQUIRED_SEALS:
        raise ArenaUnfit("it is not sealed against shrinking", size_bytes=size_bytes)
    return fd


def _place(fd: int, region: mmap.mmap, size_bytes: int, *, writable: bool) -> None:
    """Puts the file, or with -1 nothing but zeros, over the region's address range, replacing what is mapped there."""
    address = np.frombuffer(region, dtype=np.uint8).ctypes.data
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    kind = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    if _libc.mmap(address, size_bytes, protection, kind | _MAP_FIXED, fd, 0) == _MAP_FAILED:
        code = ctypes.get_errno()
        if code in (errno.EACCES, errno.EPERM):
            raise ArenaUnfit("it does not allow this mapping to write", size_bytes=size_bytes)
        raise OSError(code, os.strerror(code))
    # The advice belongs to the memory, not to the range.
    region.madvise(mmap.MADV_DONTFORK)
    with contextlib.suppress(OSError):  # kernels without huge pages for shared memory refuse the advice
        region.madvise(mmap.MADV_HUGEPAGE)


def _load_libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
    ]
    return libc


_libc = _load_libc()
