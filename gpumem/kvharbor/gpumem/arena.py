"""What an arena is to the rest: memory with one owner, and what another process needs to map it."""

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvharbor.gpumem.borrows import Borrow
    from kvharbor.gpumem.devices import Device


class ArenaKind(enum.StrEnum):
    """Where the memory lies and how it is shared; the values are those of the wire."""

    HOST = "host"
    CUDA_IPC = "cuda_ipc"
    CUDA_VMM = "cuda_vmm"


@dataclass(frozen=True, slots=True)
class Export:
    """What another process needs to map an arena; it owns nothing.

    `fds` belong to the arena, or to whoever received them, and are valid no longer than these say.
    """

    kind: ArenaKind
    size_bytes: int
    fds: tuple[int, ...] = ()
    """HOST: one. CUDA_IPC: none. CUDA_VMM: one a chunk."""
    device: str = ""
    """UUID of the device [M12]; empty for HOST."""
    offset_bytes: int = 0
    """CUDA_IPC: where the arena begins in the allocation that the handle names."""
    ipc_handle: bytes = b""
    """CUDA_IPC: the 64 bytes of the handle of a whole allocation."""
    exporter_pid: int = 0
    """CUDA_IPC: pid of the exporting process as that process sees it."""
    chunk_bytes: tuple[int, ...] = ()
    """CUDA_VMM: bytes of each chunk; mapped one after the other they are the arena, and perhaps some bytes more."""


class Arena(Protocol):
    """Memory that this process owns, or holds on to for others, until `close`."""

    @property
    def kind(self) -> ArenaKind: ...

    @property
    def size_bytes(self) -> int: ...

    def export(self) -> Export:
        """Returns what others need to map the arena; its descriptors stay the arena's. Raises ArenaClosed."""
        ...

    def close(self) -> None:
        """Lets go of the memory; repeated calls do nothing."""
        ...


class Mapped(Protocol):
    """An arena that is mapped in this process, its maker's until `close`."""

    @property
    def kind(self) -> ArenaKind: ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def writable(self) -> bool: ...

    def vacate(self) -> None:
        """Lets go of the arena's memory, and keeps the address range where the kind can [M11]. Raises ArenaClosed.

        The caller asserts that nothing is at work on the memory.
        """
        ...

    def replace(self, export: Export) -> None:
        """Puts another arena of the same size in the place of what is mapped, or was [M11].

        Raises ArenaUnfit with what was mapped still there; ArenaClosed. The descriptors stay the caller's.
        """
        ...

    def close(self) -> None:
        """Unmaps the memory; repeated calls do nothing. Raises MappingInUse while any view is alive [M8]."""
        ...


class DeviceMapped(Mapped, Protocol):
    """An arena of a device that is mapped in this process."""

    @property
    def address(self) -> int:
        """Where the arena begins in this process's device addresses. Raises ArenaClosed."""
        ...

    @property
    def device(self) -> "Device": ...

    def borrow(self) -> "Borrow":
        """Returns what keeps the mapping from being closed while it lives: every view holds one [M8]."""
        ...


def attach(export: Export, *, writable: bool = True) -> Mapped:
    """Maps an arena in this process; the mapping is the caller's to close. `export.fds` may be closed afterwards.

    Raises ArenaUnfit for what cannot be mapped safely or is not of its kind, and for devices DeviceNotVisible,
    CudaUnavailable and DeviceFailed; CUDA_IPC knows no read-only maps.
    """
    # Here, as each kind's module imports this one, and a host has no use for the others.
    match export.kind:
        case ArenaKind.HOST:
            from kvharbor.gpumem.mapping import Mapping

            return Mapping.attach(export, writable=writable)
        case ArenaKind.CUDA_IPC:
            from kvharbor.gpumem.ipc_mapping import IpcMapping

            return IpcMapping.attach(export, writable=writable)
        case ArenaKind.CUDA_VMM:
            from kvharbor.gpumem.vmm_mapping import VmmMapping

            return VmmMapping.attach(export, writable=writable)
