"""The arena of device memory in chunks: physical memory behind descriptors that any process can hold and map.

No process is needed to keep the memory, and none needs a context to own it: whoever has the descriptors has it.
"""

import contextlib
import os
from collections.abc import Sequence
from types import TracebackType
from typing import ClassVar, Self

from kvharbor.gpumem import driver
from kvharbor.gpumem.arena import ArenaKind, Export
from kvharbor.gpumem.bounds import check_int
from kvharbor.gpumem.device_copies import zero_on_device
from kvharbor.gpumem.devices import Device, current, room_for
from kvharbor.gpumem.errors import ArenaClosed, ArenaUnfit, LayoutInvalid
from kvharbor.gpumem.layout import MAX_ARENA_BYTES
from kvharbor.gpumem.vmm_mapping import VmmMapping

MAX_CHUNKS = 32
"""Each chunk is a descriptor to send and to keep."""
_FIRST_CHUNKS = MAX_CHUNKS // 2  # the others are for growing


class VmmArena:
    """Owns physical memory of one device, by a descriptor a chunk, until `close`.

    The memory itself lives until the last descriptor, handle and mapping of it is gone, in any process; that the
    driver keeps this promise after the death of the process that made it was not seen on hardware.
    Fresh memory reads as zeros [P6].
    """

    kind: ClassVar[ArenaKind] = ArenaKind.CUDA_VMM

    def __init__(self, device: Device, size_bytes: int, *, fds: Sequence[int], chunk_bytes: Sequence[int]) -> None:
        self.device = device
        self.size_bytes = size_bytes
        self._fds = list(fds)
        self._chunk_bytes = list(chunk_bytes)
        self._closed = False

    @classmethod
    def create(cls, size_bytes: int, device: Device) -> Self:
        """Takes at least `size_bytes` of the device in chunks and zeroes them; blocks as long as the device takes.

        Raises InsufficientMemory where the device has no room, with nothing taken; DeviceFailed, CudaUnavailable.
        """
        check_int("size_bytes", size_bytes, 1, MAX_ARENA_BYTES)
        chunk_bytes = _cut(size_bytes, granularity_bytes(device))
        return cls(device, size_bytes, fds=_made(chunk_bytes, device), chunk_bytes=chunk_bytes)

    @classmethod
    def opened(cls, fds: Sequence[int], chunk_bytes: Sequence[int], *, device: Device, size_bytes: int) -> Self:
        """Takes over the descriptors of an arena of `size_bytes` that another process has made.

        Raises ArenaUnfit, with the descriptors still the caller's, unless there is one a chunk and room in them.
        """
        if len(fds) != len(chunk_bytes) or not 1 <= size_bytes <= sum(chunk_bytes):
            cause = f"it has {len(fds)} descriptors of {len(chunk_bytes)} chunks with {sum(chunk_bytes)} bytes"
            raise ArenaUnfit(cause, size_bytes=size_bytes)
        return cls(device, size_bytes, fds=fds, chunk_bytes=chunk_bytes)

    def export(self) -> Export:
        """Returns what another process needs to map the arena; the descriptors in it are the arena's."""
        if self._closed:
            raise ArenaClosed("arena")
        return Export(
            ArenaKind.CUDA_VMM,
            self.size_bytes,
            fds=tuple(self._fds),
            device=self.device.uuid,
            chunk_bytes=tuple(self._chunk_bytes),
        )

    def map(self, *, writable: bool = True) -> VmmMapping:
        """Maps the arena in this process; the mapping is the caller's to close and may outlive the arena."""
        return VmmMapping.attach(self.export(), writable=writable)

    def grow(self, size_bytes: int) -> None:
        """Makes the arena `size_bytes` long, by one more zeroed chunk where the chunks have no room for it.

        Mappings stay as they are until `VmmMapping.resize`. What an earlier `shrink` has left in the last chunk is
        as it was. Raises InsufficientMemory, and LayoutInvalid for less than it has or more chunks than an arena may
        have, with nothing changed.
        """
        missing_bytes = size_bytes - sum(self.export().chunk_bytes)
        if size_bytes < self.size_bytes or (missing_bytes > 0 and len(self._fds) == MAX_CHUNKS):
            limit = f"at least the arena's {self.size_bytes}, and in the {MAX_CHUNKS} chunks that an arena may have"
            raise LayoutInvalid("size_bytes", size_bytes, limit, "open a new arena")
        if missing_bytes > 0:
            chunk = _rounded_up(missing_bytes, granularity_bytes(self.device))
            self._fds += _made([chunk], self.device)
            self._chunk_bytes.append(chunk)
        self.size_bytes = size_bytes

    def shrink(self, size_bytes: int) -> None:
        """Makes the arena `size_bytes` long and lets go of the chunks that lie wholly beyond.

        Their memory goes when the mappings have let go too (`VmmMapping.resize`). Raises LayoutInvalid for less than
        a byte or more than it has.
        """
        first_beyond = sum(self.export().chunk_bytes)
        check_int("size_bytes", size_bytes, 1, self.size_bytes)
        while first_beyond - self._chunk_bytes[-1] >= size_bytes:
            first_beyond -= self._chunk_bytes.pop()
            os.close(self._fds.pop())
        self.size_bytes = size_bytes

    def close(self) -> None:
        """Closes the descriptors; repeated calls do nothing. Mappings, here and elsewhere, stay valid."""
        self._closed = True
        while self._fds:
            os.close(self._fds.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def granularity_bytes(device: Device) -> int:
    """Returns the bytes that the device's memory comes in; an arena takes whole ones. Raises as `create`."""
    driver.init()
    return driver.granularity_bytes(device.ordinal)


def _rounded_up(size_bytes: int, piece_bytes: int) -> int:
    return -(-size_bytes // piece_bytes) * piece_bytes


def _cut(size_bytes: int, piece_bytes: int) -> list[int]:
    """Sizes of chunks that hold `size_bytes`, all but the last one equal."""
    whole_bytes = _rounded_up(size_bytes, piece_bytes)
    chunk_bytes = _rounded_up(-(-whole_bytes // _FIRST_CHUNKS), piece_bytes)
    full, rest_bytes = divmod(whole_bytes, chunk_bytes)
    return [chunk_bytes] * full + ([rest_bytes] if rest_bytes else [])


def _made(chunk_bytes: Sequence[int], device: Device) -> list[int]:
    """Descriptors of new physical memory, zeroed; all of it or, raising, none [M15]."""
    with contextlib.ExitStack() as undo:
        fds = []
        for size_bytes in chunk_bytes:
            fds.append(_taken(size_bytes, sum(chunk_bytes), device))
            undo.callback(os.close, fds[-1])
        _zero(Export(ArenaKind.CUDA_VMM, sum(chunk_bytes), tuple(fds), device.uuid, chunk_bytes=tuple(chunk_bytes)))
        undo.pop_all()
    return fds


def _taken(size_bytes: int, needed_bytes: int, device: Device) -> int:
    """A descriptor of new physical memory; it alone keeps the memory."""
    with room_for(needed_bytes, device):
        handle = driver.mem_create(size_bytes, device.ordinal)
    try:
        return driver.mem_export_fd(handle)
    finally:
        driver.mem_release(handle)


def _zero(export: Export) -> None:
    """Zeroes memory that nobody else has seen: what was there is another process's [P6]."""
    with VmmMapping.attach(export) as mapping, current(mapping.device):
        zero_on_device(mapping.address, export.size_bytes, stream=0)
