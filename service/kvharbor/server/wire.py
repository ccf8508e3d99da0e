"""Messages as values of `kvharbor.pool` and `kvharbor.gpumem`, and back. Nothing is decided here."""

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import TypeVar

from google.protobuf import duration_pb2

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
from kvharbor.pool import Adopted, Commit, ExtraKey, Held, Pending, Prompt, SequenceView, Shadow, validate
from kvharbor.pool.digest import PlaneIdentity, pool_identity
from kvharbor.pool.errors import InvalidField
from kvharbor.v1 import cache_service_pb2 as cache_pb
from kvharbor.v1 import side_pb2, types_pb2

T = TypeVar("T")

MAX_DURATION_S = 10 * 365 * 86400

_BIG_ENDIAN = sys.byteorder == "big"
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


def little_endian(code: str, values: "array[int] | Iterable[int]") -> bytes:
    """Returns integers as little-endian bytes: "I" for uint32, "Q" for uint64."""
    packed = values if isinstance(values, array) else array(code, values)
    if _BIG_ENDIAN:
        packed = array(code, packed)
        packed.byteswap()
    return packed.tobytes()


def integers(field: str, code: str, data: bytes) -> "array[int]":
    """Returns little-endian bytes as integers; refuses a length that is not a multiple of their size."""
    values = array(code)
    if len(data) % values.itemsize:
        raise InvalidField(
            field=field,
            value=f"{len(data)} bytes long",
            limit=f"a multiple of {values.itemsize} bytes",
            remedy="encode each value in little-endian",
        )
    values.frombytes(data)
    if _BIG_ENDIAN:
        values.byteswap()
    return values


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


def prompt_of(
    request: cache_pb.AllocateRequest | cache_pb.LookupRequest | cache_pb.WarmupRequest,
) -> Prompt:
    """Returns the prompt that the request carries."""
    extra_keys = _extra_keys(request.extra_keys)
    if not request.HasField("namespace"):
        return Prompt(request.token_ids, extra_keys)
    namespace = request.namespace
    return Prompt(request.token_ids, extra_keys, namespace.version, namespace.adapter, namespace.salt)


def commit_of(item: cache_pb.CommitItem) -> Commit:
    """Returns the commit that the item asks for."""
    written = None
    if item.HasField("written"):
        written = (
            integers("written.block_ids", "I", item.written.block_ids),
            integers("written.generations", "Q", item.written.generations),
        )
    validate.listed("switched_positions", len(item.switched_positions), validate.MAX_SWITCHED)
    return Commit(
        computed_tokens=item.computed_tokens,
        new_token_ids=item.new_token_ids,
        extra_keys=_extra_keys(item.extra_keys),
        written=written,
        switched=tuple(item.switched_positions),
        known_token_count=item.known_token_count if item.HasField("known_token_count") else None,
    )


def held_of(item: cache_pb.HeldSequence, number: int) -> Held:
    """Returns a sequence as its session has it; `number` is that of its handle."""
    sequence = item.sequence
    return Held(
        number=number,
        block_ids=integers("sequence.table.block_ids", "I", sequence.table.block_ids),
        generations=integers("sequence.table.generations", "Q", sequence.table.generations),
        cached_tokens=sequence.cached_tokens,
        computed_tokens=sequence.computed_tokens,
        token_count=sequence.token_count,
        committed_tokens=item.committed_tokens,
        tail_token_ids=item.tail_token_ids,
        extra_keys=_extra_keys(item.extra_keys),
        version=item.namespace.version,
        adapter=item.namespace.adapter,
        salt=item.namespace.salt,
        request_id=sequence.request_id,
        group=sequence.group,
        pin_name=item.pin_name,
    )


def sequence_message(view: SequenceView, prefix: str) -> types_pb2.Sequence:
    """Returns a sequence as a message; `prefix` and its number make its handle."""
    return types_pb2.Sequence(
        sequence_id=f"{prefix}{view.number}",
        table=types_pb2.BlockTable(
            block_ids=little_endian("I", view.block_ids), generations=little_endian("Q", view.generations)
        ),
        cached_tokens=view.cached_tokens,
        computed_tokens=view.computed_tokens,
        token_count=view.token_count,
        capacity_tokens=view.capacity_tokens,
        request_id=view.request_id,
        group=view.group,
    )


def adopted_message(adopted: Adopted, prefix: str) -> cache_pb.AdoptResponse:
    """Returns an adopted sequence as the answer to its Adopt."""
    return cache_pb.AdoptResponse(
        sequence=sequence_message(adopted.view, prefix),
        namespace=types_pb2.NamespaceKey(version=adopted.version, adapter=adopted.adapter, salt=adopted.salt),
        committed_tokens=adopted.committed_tokens,
        tail_token_ids=adopted.tail_token_ids,
        extra_keys=[types_pb2.ExtraKey(token_offset=key.token_offset, value=key.value) for key in adopted.extra_keys],
    )


def pending_message(pending: Pending | None) -> cache_pb.Pending | None:
    """Returns what another session is computing of a prompt as a message, or None for nothing."""
    if pending is None:
        return None
    session_id = str(pending.session) if pending.session else ""
    return cache_pb.Pending(
        token_count=pending.token_count, session_id=session_id, idle=duration_message(pending.idle_s)
    )


def shadow_message(shadow: Shadow) -> cache_pb.Shadow:
    """Returns a shadow as a message."""
    return cache_pb.Shadow(position=shadow.position, block_id=shadow.block_id, generation=shadow.generation)


def seconds_of(field: str, message: duration_pb2.Duration, *, least_s: float = 0.0) -> float:
    """Returns a duration in seconds; refuses less than `least_s` and more than ten years."""
    seconds = message.seconds + message.nanos / 1e9
    if not least_s <= seconds <= MAX_DURATION_S:
        raise InvalidField(
            field=field,
            value=f"{seconds:g} s",
            limit=f"{least_s:g} s to ten years",
            remedy="leave it out for none" if field.endswith("wait") else "leave it out for no end",
        )
    return seconds


def duration_message(seconds: float) -> duration_pb2.Duration:
    """Returns seconds as a message."""
    message = duration_pb2.Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message


def _extra_keys(messages: Sequence[types_pb2.ExtraKey]) -> tuple[ExtraKey, ...]:
    validate.listed("extra_keys", len(messages), validate.MAX_EXTRA_KEYS)
    return tuple([ExtraKey(key.token_offset, key.value) for key in messages])


def _member(field: str, number: int, members: dict[int, T]) -> T:
    if number not in members:
        names = ", ".join(str(member) for member in members.values())
        raise LayoutInvalid(field, number, f"a known value ({names})", "set it, or update the service")
    return members[number]
