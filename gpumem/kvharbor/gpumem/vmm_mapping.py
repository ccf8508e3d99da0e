"""The attach side of a cuda_vmm arena: its chunks one after the other in a range of device addresses.

The range is there apart from the memory in it, so that another arena can take the place of the first one [M9] [M11].
"""

import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import ClassVar, Self

from kvharbor.gpumem import driver
from kvharbor.gpumem.address_range import AddressRange
from kvharbor.gpumem.arena import ArenaKind, Export
from kvharbor.gpumem.borrows import Borrow, Borrows
from kvharbor.gpumem.devices import Device, device_of
from kvharbor.gpumem.errors import ArenaClosed, ArenaUnfit, MappingInUse


class VmmMapping:
    """An arena at fixed device addresses. Made by `attach`; owned by its maker until `close`.

    A mapping that is dropped without `close` is closed when the last borrow of it goes. A forked child has no use of
    it: no context outlives a fork, and device memory is not in the address space that a child inherits [M7]. A kernel
    that stores into a read-only mapping breaks the context of its own process only (not seen on hardware).
    """

    kind: ClassVar[ArenaKind] = ArenaKind.CUDA_VMM

    def __init__(self, place: AddressRange, *, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.device: Device = place.device
        self.writable = place.writable
        self._place: AddressRange | None = place
        self._borrows = Borrows()
        self._placing = threading.Lock()
        self._unclosed = weakref.finalize(self, place.free)
        self._unclosed.atexit = False  # the end of the process does it

    @classmethod
    def attach(cls, export: Export, *, writable: bool = True, reserved_bytes: int = 0) -> Self:
        """Maps an arena, whose descriptors stay the caller's and may be closed afterwards.

        Addresses are reserved for the arena, or for `reserved_bytes` if that is more: so far it may grow (`resize`).
        Raises ArenaUnfit when the export is not one of such an arena; DeviceNotVisible, CudaUnavailable, DeviceFailed.
        """
        device = device_of(export.device)
        granularity_bytes = driver.granularity_bytes(device.ordinal)
        _require_fit(export, granularity_bytes)
        with contextlib.ExitStack() as undo:
            place = AddressRange.reserve(
                device,
                max(sum(export.chunk_bytes), reserved_bytes),
                granularity_bytes=granularity_bytes,
                writable=writable,
            )
            undo.callback(place.free)
            with _imported(export.fds) as handles:
                place.map(handles, export.chunk_bytes)
            undo.pop_all()
        return cls(place, size_bytes=export.size_bytes)

    @property
    def address(self) -> int:
        """Where the arena begins in this process's device addresses. Raises ArenaClosed."""
        return self._present().address

    def borrow(self) -> Borrow:
        """Returns what keeps the mapping from being closed while it lives [M8]. Raises ArenaClosed."""
        with self._placing:
            self._present()
            return self._borrows.lend(self)

    def vacate(self) -> None:
        """Lets go of the arena's memory and keeps the addresses, with nothing there [M11]. Raises ArenaClosed.

        The caller asserts that nothing is at work on the memory. Where a host mapping would read as zeros, a kernel
        that touches the range breaks its context.
        """
        with self._placing:
            self._present().unmap()

    def replace(self, export: Export) -> None:
        """Puts another arena of the same size in the place of what is mapped, or was, at the same addresses [M11].

        The caller asserts that nothing is at work on the memory. Raises ArenaUnfit, with what was mapped still there,
        when the export does not fit as in `attach`, or in size or device; ArenaClosed; DeviceFailed, which leaves
        the range vacant unless it was the descriptors' fault.
        """
        if export.size_bytes != self.size_bytes:
            raise ArenaUnfit(f"the other arena has {export.size_bytes}", size_bytes=self.size_bytes)
        self._follow(export, kept_chunks=0)

    def resize(self, export: Export) -> None:
        """Follows an arena that has grown or shrunk: the chunks that it has kept stay mapped as they are.

        The caller asserts that `export` is of the same arena, and that nothing is at work on what goes. Raises
        ArenaUnfit, with nothing changed, when it has other chunks, more than the range has room for, or does not fit
        as in `replace`; ArenaClosed; DeviceFailed, with nothing added.
        """
        mapped = self._present().chunk_bytes
        kept_chunks = min(len(mapped), len(export.chunk_bytes))
        if tuple(mapped[:kept_chunks]) != export.chunk_bytes[:kept_chunks]:
            cause = f"its chunks are not those of the {self.size_bytes} bytes that are mapped"
            raise ArenaUnfit(cause, size_bytes=export.size_bytes)
        self._follow(export, kept_chunks=kept_chunks)

    def close(self) -> None:
        """Unmaps the memory and gives the addresses back; repeated calls do nothing.

        The caller asserts that nothing is at work on the memory. Raises MappingInUse while any borrow lives [M8].
        """
        with self._placing:
            if self._place is None:
                return
            if self._borrows.count:
                raise MappingInUse(self.size_bytes)
            self._unclosed.detach()
            place, self._place = self._place, None
            place.free()

    def _present(self) -> AddressRange:
        if self._place is None:
            raise ArenaClosed("mapping")
        return self._place

    def _follow(self, export: Export, *, kept_chunks: int) -> None:
        """Maps an export's chunks behind the first `kept_chunks`, in the place of what is mapped there."""
        with self._placing:
            place = self._present()
            _require_fit(export, driver.granularity_bytes(self.device.ordinal))
            if device_of(export.device) != self.device:
                cause = f"it lies on device {export.device}, the mapping on {self.device.uuid}"
                raise ArenaUnfit(cause, size_bytes=export.size_bytes)
            if sum(export.chunk_bytes) > place.reserved_bytes:
                cause = f"{place.reserved_bytes} bytes of addresses are reserved"
                raise ArenaUnfit(cause, size_bytes=export.size_bytes)
            with _imported(export.fds[kept_chunks:]) as handles:
                place.unmap(first_chunk=kept_chunks)
                place.map(handles, export.chunk_bytes[kept_chunks:])
            self.size_bytes = export.size_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _require_fit(export: Export, granularity_bytes: int) -> None:
    """The sizes come from the wire, and are checked before the driver sees them [M3]."""
    if export.kind is not ArenaKind.CUDA_VMM or len(export.fds) != len(export.chunk_bytes):
        cause = f"it is {export.kind} memory with {len(export.fds)} descriptors of {len(export.chunk_bytes)} chunks"
    elif any(size_bytes < 1 or size_bytes % granularity_bytes for size_bytes in export.chunk_bytes):
        cause = f"a chunk is not a multiple of the device's {granularity_bytes} bytes"
    elif not 1 <= export.size_bytes <= sum(export.chunk_bytes):
        cause = f"its chunks have {sum(export.chunk_bytes)}"
    else:
        return
    raise ArenaUnfit(cause, size_bytes=export.size_bytes)


@contextlib.contextmanager
def _imported(fds: Sequence[int]) -> Iterator[list[int]]:
    """Handles of the physical memory behind descriptors, for the block: what is mapped stays without them."""
    with contextlib.ExitStack() as release:
        handles = []
        for fd in fds:
            handles.append(driver.mem_import_fd(fd))
            release.callback(driver.mem_release, handles[-1])
        yield handles
