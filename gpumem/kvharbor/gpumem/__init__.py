"""Bytes of a KV cache: arenas, the layout of blocks in them, views and copies. No policy, no gRPC."""

from kvharbor.gpumem.arena import Arena, ArenaKind, DeviceMapped, Export, Mapped, attach
from kvharbor.gpumem.copies import copy_blocks
from kvharbor.gpumem.cuda_ipc import IpcArena
from kvharbor.gpumem.cuda_vmm import VmmArena
from kvharbor.gpumem.device_copies import copy_blocks_on_device, zero_on_device
from kvharbor.gpumem.devices import Device, device_of, mps_client, visible_devices
from kvharbor.gpumem.errors import (
    ArenaClosed,
    ArenaTooSmall,
    ArenaUnfit,
    ArenaUnproven,
    CopyConflict,
    CudaRuntimeUnknown,
    CudaUnavailable,
    DeviceFailed,
    DeviceNotVisible,
    GpumemError,
    InsufficientMemory,
    IpcRefused,
    LayoutInvalid,
    LayoutMismatch,
    MappingInUse,
    OutOfBounds,
    PlaneUnknown,
    ReservationCancelled,
    ViewUnavailable,
)
from kvharbor.gpumem.holders import LeftMemory, left_memory
from kvharbor.gpumem.host import HostArena
from kvharbor.gpumem.ipc_mapping import IpcMapping
from kvharbor.gpumem.ipc_runtime import runtime_of
from kvharbor.gpumem.layout import BlockOrder, Descriptor, Layout, PlaneSpan, block_count_for, check_plane_count
from kvharbor.gpumem.mapping import Mapping
from kvharbor.gpumem.plane import TOKEN_HEAD_DIM, DataType, Plane
from kvharbor.gpumem.room import MemoryRoom, memory_room, require_room
from kvharbor.gpumem.views import BlockViews, Run, block_runs
from kvharbor.gpumem.vmm_mapping import VmmMapping

__all__ = [
    "TOKEN_HEAD_DIM",
    "Arena",
    "ArenaClosed",
    "ArenaKind",
    "ArenaTooSmall",
    "ArenaUnfit",
    "ArenaUnproven",
    "BlockOrder",
    "BlockViews",
    "CopyConflict",
    "CudaRuntimeUnknown",
    "CudaUnavailable",
    "DataType",
    "Descriptor",
    "Device",
    "DeviceFailed",
    "DeviceMapped",
    "DeviceNotVisible",
    "Export",
    "GpumemError",
    "HostArena",
    "InsufficientMemory",
    "IpcArena",
    "IpcMapping",
    "IpcRefused",
    "Layout",
    "LayoutInvalid",
    "LayoutMismatch",
    "LeftMemory",
    "Mapped",
    "Mapping",
    "MappingInUse",
    "MemoryRoom",
    "OutOfBounds",
    "Plane",
    "PlaneSpan",
    "PlaneUnknown",
    "ReservationCancelled",
    "Run",
    "ViewUnavailable",
    "VmmArena",
    "VmmMapping",
    "attach",
    "block_count_for",
    "block_runs",
    "check_plane_count",
    "copy_blocks",
    "copy_blocks_on_device",
    "device_of",
    "left_memory",
    "memory_room",
    "mps_client",
    "require_room",
    "runtime_of",
    "visible_devices",
    "zero_on_device",
]
