"""Bytes of a KV cache: arenas, the layout of blocks in them, views and copies. No policy, no gRPC."""

from kvharbor.gpumem.copies import copy_blocks
from kvharbor.gpumem.errors import (
    ArenaClosed,
    ArenaTooSmall,
    ArenaUnfit,
    CopyConflict,
    GpumemError,
    InsufficientMemory,
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
from kvharbor.gpumem.layout import BlockOrder, Descriptor, Layout, PlaneSpan, block_count_for, check_plane_count
from kvharbor.gpumem.mapping import Mapping
from kvharbor.gpumem.plane import TOKEN_HEAD_DIM, DataType, Plane
from kvharbor.gpumem.room import MemoryRoom, memory_room, require_room
from kvharbor.gpumem.views import BlockViews, Run, block_runs

__all__ = [
    "TOKEN_HEAD_DIM",
    "ArenaClosed",
    "ArenaTooSmall",
    "ArenaUnfit",
    "BlockOrder",
    "BlockViews",
    "CopyConflict",
    "DataType",
    "Descriptor",
    "GpumemError",
    "HostArena",
    "InsufficientMemory",
    "Layout",
    "LayoutInvalid",
    "LayoutMismatch",
    "LeftMemory",
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
    "block_count_for",
    "block_runs",
    "check_plane_count",
    "copy_blocks",
    "left_memory",
    "memory_room",
    "require_room",
]
