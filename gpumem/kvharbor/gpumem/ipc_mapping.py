"""The attach side of a cuda_ipc arena: another process's allocation, opened once in this one."""

import os
import threading
import weakref
from types import TracebackType
from typing import ClassVar, Self

from kvharbor.gpumem.arena import ArenaKind, Export
from kvharbor.gpumem.borrows import Borrow, Borrows
from kvharbor.gpumem.devices import Device, device_of
from kvharbor.gpumem.driver import IPC_HANDLE_BYTES
from kvharbor.gpumem.errors import ArenaClosed, ArenaUnfit, IpcRefused, MappingInUse
from kvharbor.gpumem.ipc_handles import HANDLES, OpenHandle
from kvharbor.gpumem.ipc_runtime import IpcRuntime, runtime_of


class IpcMapping:
    """`size_bytes` of an arena in this process. Made by `attach`; owned by its maker until `close`.

    CUDA chooses the address, so that another arena cannot take the place of this one under living views: `vacate`
    and `replace` want them gone first. A mapping that is dropped without `close` is closed when the last view over
    it goes. It is of no use in a forked child, in which CUDA is dead [M7].
    """

    kind: ClassVar[ArenaKind] = ArenaKind.CUDA_IPC
    writable: ClassVar[bool] = True

    def __init__(self, opened: OpenHandle, *, offset_bytes: int, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._changing = threading.Lock()
        self._borrows = Borrows()
        self._closed = False
        self._hold(opened, offset_bytes)

    @classmethod
    def attach(cls, export: Export, *, writable: bool = True, runtime: IpcRuntime | None = None) -> Self:
        """Opens the arena's handle, or shares it with whoever has it open here; `runtime` is as in `runtime_of`.

        Raises ArenaUnfit for a read-only mapping, which CUDA IPC does not know, and for an export of another kind or
        with a broken handle; IpcRefused in the exporting process itself, and where the driver would take this one
        for it; DeviceNotVisible, CudaUnavailable, DeviceFailed.
        """
        if not writable:
            raise ArenaUnfit(
                "CUDA IPC cannot map read-only; map it for writing, or use the arena 'cuda_vmm'",
                size_bytes=export.size_bytes,
            )
        opened = _opened(export, runtime)
        return cls(opened, offset_bytes=export.offset_bytes, size_bytes=export.size_bytes)

    @property
    def address(self) -> int:
        """Where the arena begins in this process; another place after `replace`. Raises ArenaClosed."""
        return self._present().address + self._offset_bytes

    @property
    def device(self) -> Device:
        """Where the memory lies, or last lay."""
        return self._device

    def borrow(self) -> Borrow:
        """Returns what keeps the mapping from being closed while it lives. Raises ArenaClosed."""
        with self._changing:
            self._present()
            return self._borrows.lend(self)

    def vacate(self) -> None:
        """Lets go of the arena's memory; there is no address until `replace`. Raises MappingInUse, ArenaClosed.

        What this process has queued on the device is waited for. Other mappings of the arena in this process keep it.
        """
        with self._changing:
            self._require_replaceable()
            self._let_go()

    def replace(self, export: Export) -> None:
        """Opens another arena in the place of what is mapped, or was: at another address, perhaps on another device.

        Raises what `attach` does, and MappingInUse while any view is alive, with what was mapped still there;
        ArenaClosed.
        """
        with self._changing:
            self._require_replaceable()
            if export.size_bytes != self.size_bytes:
                raise ArenaUnfit(f"the other arena has {export.size_bytes}", size_bytes=self.size_bytes)
            opened = _opened(export, self._runtime)
            self._let_go()
            self._hold(opened, export.offset_bytes)

    def close(self) -> None:
        """Ends this use of the memory; repeated calls do nothing. Raises MappingInUse while any view is alive [M8].

        The last use in the process waits for what it has queued on the device, and unmaps the memory.
        """
        with self._changing:
            if not self._closed:
                self._require_replaceable()
                self._let_go()
                self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _present(self) -> OpenHandle:
        if self._opened is None:
            raise ArenaClosed("mapping" if self._closed else "vacated mapping")
        return self._opened

    def _require_replaceable(self) -> None:
        if self._closed:
            raise ArenaClosed("mapping")
        if self._borrows.count:
            raise MappingInUse(self.size_bytes)

    def _hold(self, opened: OpenHandle, offset_bytes: int) -> None:
        self._opened: OpenHandle | None = opened
        self._device, self._runtime = opened.device, opened.runtime
        self._offset_bytes = offset_bytes
        self._dropped = weakref.finalize(self, HANDLES.abandon, opened)
        # A process that ends closes everything, and CUDA may be gone before Python gets to it.
        self._dropped.atexit = False

    def _let_go(self) -> None:
        if self._opened is not None:
            opened, self._opened = self._opened, None
            self._dropped.detach()
            HANDLES.close(opened)


def _opened(export: Export, runtime: IpcRuntime | None) -> OpenHandle:
    _require_fit(export)
    _require_foreign(export)
    return HANDLES.open(device_of(export.device), export.ipc_handle, runtime or runtime_of())


def _require_fit(export: Export) -> None:
    cause = None
    if export.kind is not ArenaKind.CUDA_IPC:
        cause = f"it is of the kind {export.kind.value!r}, not 'cuda_ipc'"
    elif len(export.ipc_handle) != IPC_HANDLE_BYTES:
        cause = f"its handle has {len(export.ipc_handle)} bytes, not {IPC_HANDLE_BYTES}"
    elif export.offset_bytes < 0:
        cause = f"it begins at {export.offset_bytes}, before its allocation"
    elif export.size_bytes < 1:
        cause = "a mapping has at least one byte"
    if cause is not None:
        raise ArenaUnfit(cause, size_bytes=export.size_bytes)


def _require_foreign(export: Export) -> None:
    """Raises IpcRefused where the driver would refuse this process as the exporting one, with a bare code."""
    own_pid = os.getpid()
    if HANDLES.has_exported(export.ipc_handle):
        cause, remedy = "it is its own", "use the memory at IpcArena.address"
    elif export.exporter_pid == own_pid:
        cause = "both have this pid, each in a PID namespace of its own, and the driver takes them for one process"
        remedy = (
            "let them share a PID namespace (Kubernetes: shareProcessNamespace; Docker: --pid=container:NAME), or use "
            "the arena 'cuda_vmm'"
        )
    else:
        return
    raise IpcRefused(cause, device=export.device, exporter_pid=export.exporter_pid, own_pid=own_pid, remedy=remedy)
