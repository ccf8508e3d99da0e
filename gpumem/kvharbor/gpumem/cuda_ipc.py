"""The cuda_ipc arena: one plain allocation on a device, exported by the handle of its base.

It cannot be resized, nor mapped read-only, and its memory is the exporting process's: when that dies, processes
that have it open keep it, and nobody else can come to it.
"""

import contextlib
import os
from types import TracebackType
from typing import ClassVar, Final, Self

from kvharbor.gpumem.arena import ArenaKind, Export
from kvharbor.gpumem.bounds import check_int
from kvharbor.gpumem.devices import Device, room_for
from kvharbor.gpumem.errors import ArenaClosed
from kvharbor.gpumem.ipc_handles import HANDLES
from kvharbor.gpumem.ipc_runtime import IpcRuntime, runtime_of
from kvharbor.gpumem.layout import MAX_ARENA_BYTES

ALLOCATION_BYTES: Final = 2 * 2**20
"""CUDA may cut smaller allocations from a common piece of this size, and a handle gives away the whole piece [M14]."""


class IpcArena:
    """Owns `size_bytes` of a device's memory, zeroed [P6], which begin at `address` in this process.

    `close` frees them, and CUDA does not say what becomes of a process that still has them open: whoever closes has
    to know that every other process is gone or has closed its mapping. A process that exits without `close` leaves
    the memory to those that have it open.
    """

    kind: ClassVar[ArenaKind] = ArenaKind.CUDA_IPC

    def __init__(self, device: Device, address: int, handle: bytes, *, size_bytes: int, runtime: IpcRuntime) -> None:
        self.device = device
        self.size_bytes = size_bytes
        self._address: int | None = address
        self._handle = handle
        self._runtime = runtime
        HANDLES.add_exported(handle)

    @classmethod
    def create(cls, size_bytes: int, device: Device, runtime: IpcRuntime | None = None) -> Self:
        """Takes the memory, in whole pieces of 2 MiB; `runtime` is `runtime_of()` unless given.

        Raises InsufficientMemory where the device has no room, DeviceFailed where the memory cannot be exported (under
        WSL none can).
        """
        check_int("size_bytes", size_bytes, 1, MAX_ARENA_BYTES)
        chosen = runtime or runtime_of()
        allocation_bytes = -(-size_bytes // ALLOCATION_BYTES) * ALLOCATION_BYTES
        with contextlib.ExitStack() as undo:
            with room_for(allocation_bytes, device):
                address = chosen.allocate(device, allocation_bytes)
            undo.callback(chosen.free, device, address)
            chosen.zero(device, address, allocation_bytes)
            arena = cls(device, address, chosen.handle_of(device, address), size_bytes=size_bytes, runtime=chosen)
            undo.pop_all()
        return arena

    @property
    def address(self) -> int:
        """Where the memory begins in this process, which cannot open its own handle. Raises ArenaClosed."""
        if self._address is None:
            raise ArenaClosed("arena")
        return self._address

    def export(self) -> Export:
        """Returns what another process needs to map the memory while this one lives. Raises ArenaClosed."""
        if self._address is None:
            raise ArenaClosed("arena")
        return Export(
            self.kind, self.size_bytes, device=self.device.uuid, ipc_handle=self._handle, exporter_pid=os.getpid()
        )

    def close(self) -> None:
        """Frees the memory; repeated calls do nothing. The caller knows that no process has it open."""
        if self._address is not None:
            address, self._address = self._address, None
            self._runtime.free(self.device, address)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
