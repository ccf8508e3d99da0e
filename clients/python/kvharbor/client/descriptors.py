"""Layouts, descriptors and exports of `kvharbor.gpumem`, to and from their messages."""

from kvharbor.client.errors import ServiceBug
from kvharbor.gpumem import ArenaKind, BlockOrder, DataType, Descriptor, Export, Layout, Plane, PlaneSpan
from kvharbor.v1 import side_pb2, types_pb2

_DATA_TYPES = {
    DataType.FLOAT32: types_pb2.DATA_TYPE_FLOAT32,
    DataType.FLOAT16: types_pb2.DATA_TYPE_FLOAT16,
    DataType.BFLOAT16: types_pb2.DATA_TYPE_BFLOAT16,
    DataType.FLOAT8_E4M3: types_pb2.DATA_TYPE_FLOAT8_E4M3,
    DataType.FLOAT8_E5M2: types_pb2.DATA_TYPE_FLOAT8_E5M2,
    DataType.UINT8: types_pb2.DATA_TYPE_UINT8,
}
_ORDERS = {
    BlockOrder.LAYER_MAJOR: types_pb2.BLOCK_ORDER_LAYER_MAJOR,
    BlockOrder.BLOCK_MAJOR: types_pb2.BLOCK_ORDER_BLOCK_MAJOR,
}
_DATA_TYPES_BACK = {value: data_type for data_type, value in _DATA_TYPES.items()}
_ORDERS_BACK = {value: order for order, value in _ORDERS.items()}


def layout_message(layout: Layout) -> types_pb2.Layout:
    """Returns the message that says what `layout` says."""
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


def layout_from(message: types_pb2.Layout) -> Layout:
    """Returns the layout that a message says; raises KeyError for types and orders newer than this client."""
    planes = tuple(
        Plane(
            name=plane.name,
            layer_count=plane.layer_count,
            data_type=_DATA_TYPES_BACK[plane.data_type],
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
        order=_ORDERS_BACK[message.order],
        tp_size=message.tp_size,
        scratch_blocks=message.scratch_block_count,
    )


def descriptor_from(message: types_pb2.PoolDescriptor) -> Descriptor:
    """Returns the addresses that the service announces; its spans are taken as they are, not recomputed."""
    layout = layout_from(message.layout)
    by_name = {plane.name: plane for plane in layout.planes}
    return Descriptor(
        layout=layout,
        block_count=message.block_count,
        size_bytes=message.size_bytes,
        spans=tuple(
            PlaneSpan(
                plane=by_name[span.name],
                offset_bytes=span.offset_bytes,
                layer_stride_bytes=span.layer_stride_bytes,
                block_stride_bytes=span.block_stride_bytes,
            )
            for span in message.spans
        ),
    )


def devices_of(message: types_pb2.PoolDescriptor) -> tuple[str, ...]:
    """Returns the UUIDs of the devices that a pool's parts lie on, by rank; none for host memory."""
    return tuple(part.device for part in message.parts if part.device)


def export_from(attached: side_pb2.Attached, fds: tuple[int, ...]) -> Export:
    """Returns how to map what the service hands out, with the descriptors that came with it; they stay whose they are.

    Raises ServiceBug for a kind of arena that is newer than this client.
    """
    try:
        kind = ArenaKind(attached.pool.arena_kind)
    except ValueError:
        known = ", ".join(ArenaKind)
        raise ServiceBug(
            f"the pool lies in a {attached.pool.arena_kind!r} arena, this client maps {known}: update it"
        ) from None
    memory = attached.device_memory
    return Export(
        kind=kind,
        size_bytes=attached.pool.size_bytes,
        fds=fds,
        device=memory.device,
        offset_bytes=memory.offset_bytes,
        ipc_handle=memory.ipc_handle,
        exporter_pid=memory.exporter_pid,
        chunk_bytes=tuple(memory.chunk_bytes),
    )
