"""Layouts and memory as messages, and back. Nothing is decided here."""

from collections.abc import Sequence
from typing import TypeVar

from kvharbor.gpumem import (
    ArenaKind,
    BlockOrder,
    DataType,
    Descriptor,
    Export,
    Layout,
    LayoutInvalid,
    Plane,
    check_plane_count,
)
from kvharbor.pool.digest import PlaneIdentity, pool_identity
from kvharbor.v1 import side_pb2, types_pb2

T = TypeVar("T")

_ORDERS = {
    BlockOrder.LAYER_MAJOR: types_pb2.BLOCK_ORDER_LAYER_MAJOR,
    BlockOrder.BLOCK_MAJOR: types_pb2.BLOCK_ORDER_BLOCK_MAJOR,
}
_DATA_TYPES = {
    DataType.FLOAT32: types_pb2.DATA_TYPE_FLOAT32,
    DataType.FLOAT16: types_pb2.DATA_TYPE_FLOAT16,
    DataType.BFLOAT16: types_pb2.DATA_TYPE_BFLOAT16,
    DataType.FLOAT8_E4M3: types_pb2.DATA_TYPE_FLOAT8_E4M3,
    DataType.FLOAT8_E5M2: types_pb2.DATA_TYPE_FLOAT8_E5M2,
    DataType.UINT8: types_pb2.DATA_TYPE_UINT8,
}
_ORDERS_BY_NUMBER: dict[int, BlockOrder] = {number: order for order, number in _ORDERS.items()}
_DATA_TYPES_BY_NUMBER: dict[int, DataType] = {number: kind for kind, number in _DATA_TYPES.items()}


def layout_of(message: types_pb2.Layout) -> Layout:
    """Returns the layout, or raises LayoutInvalid."""
    # Before they are made: a message has room for a million planes.
    check_plane_count(len(message.planes))
    planes = tuple(
        Plane(
            name=plane.name,
            layer_count=plane.layer_count,
            data_type=_member(f"planes.{plane.name[:32]}.data_type", plane.data_type, _DATA_TYPES_BY_NUMBER),
            page_bytes=plane.page_bytes,
            interior=plane.interior,
            head_count=plane.head_count,
            head_dim=plane.head_dim,
        )
        for plane in message.planes
    )
    return Layout(
        model=message.model,
        block_tokens=message.block_tokens,
        planes=planes,
        order=_member("order", message.order, _ORDERS_BY_NUMBER),
        tp_size=message.tp_size,
        scratch_blocks=message.scratch_block_count,
    )


def layout_message(layout: Layout) -> types_pb2.Layout:
    """Returns the layout as a message."""
    return types_pb2.Layout(
        model=layout.model,
        tp_size=layout.tp_size,
        block_tokens=layout.block_tokens,
        scratch_block_count=layout.scratch_blocks,
        order=_ORDERS[layout.order],
        planes=[
            types_pb2.Plane(
                name=plane.name,
                layer_count=plane.layer_count,
                data_type=_DATA_TYPES[plane.data_type],
                page_bytes=plane.page_bytes,
                interior=plane.interior,
                head_count=plane.head_count,
                head_dim=plane.head_dim,
            )
            for plane in layout.planes
        ],
    )


def descriptor_message(
    descriptor: Descriptor, kind: ArenaKind, places: Sequence[str], *, pool_id: str, name: str, tenant: str, epoch: str
) -> types_pb2.PoolDescriptor:
    """Returns a pool's descriptor as a message; `places` are the devices of its parts, "" for the host."""
    return types_pb2.PoolDescriptor(
        pool_id=pool_id,
        name=name,
        tenant=tenant,
        epoch=epoch,
        arena_kind=kind.value,
        layout=layout_message(descriptor.layout),
        block_count=descriptor.block_count,
        size_bytes=descriptor.size_bytes,
        spans=[
            types_pb2.PlaneSpan(
                name=span.plane.name,
                offset_bytes=span.offset_bytes,
                layer_stride_bytes=span.layer_stride_bytes,
                block_stride_bytes=span.block_stride_bytes,
            )
            for span in descriptor.spans
        ],
        parts=[types_pb2.PoolPart(device=place) for place in places],
    )


def device_memory_message(export: Export) -> side_pb2.DeviceMemory:
    """Returns what another process needs to map memory of a device, beside its descriptors."""
    return side_pb2.DeviceMemory(
        device=export.device,
        ipc_handle=export.ipc_handle,
        offset_bytes=export.offset_bytes,
        exporter_pid=export.exporter_pid,
        chunk_bytes=export.chunk_bytes,
    )


def identity_of(layout: Layout) -> bytes:
    """Returns what the layout contributes to the digests of its blocks."""
    planes = [
        PlaneIdentity(plane.name, plane.layer_count, plane.data_type.value, plane.page_bytes, plane.interior)
        for plane in layout.planes
    ]
    return pool_identity(layout.model, layout.tp_size, layout.block_tokens, planes)


def _member(field: str, number: int, members: dict[int, T]) -> T:
    if number not in members:
        names = ", ".join(str(member) for member in members.values())
        raise LayoutInvalid(field, number, f"a known value ({names})", "set it, or update the service")
    return members[number]
