"""Messages as values of `kvharbor.pool`, and back. Nothing is decided here."""

import sys
from array import array
from collections.abc import Iterable, MutableSequence, Sequence

from google.protobuf import duration_pb2

from kvharbor.pool import (
    Adopted,
    BlockRun,
    Commit,
    ExpectedReuse,
    ExtraKey,
    Held,
    Hints,
    Pending,
    Prompt,
    SequenceView,
    Shadow,
    validate,
)
from kvharbor.pool.errors import InvalidField
from kvharbor.pool.hints import NO_HINTS
from kvharbor.pool.steps import Steps
from kvharbor.v1 import cache_service_pb2 as cache_pb
from kvharbor.v1 import types_pb2

MAX_DURATION_S = 10 * 365 * 86400

# Between so many entries of a result others are served.
_SHADOWS_A_SLICE = 1024
_BIG_ENDIAN = sys.byteorder == "big"


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


def prompt_of(
    request: cache_pb.AllocateRequest | cache_pb.LookupRequest | cache_pb.WarmupRequest, version: str = ""
) -> Prompt:
    """Returns the prompt that the request carries; `version` is that of a session, for one that names none."""
    extra_keys = extra_keys_of(request.extra_keys)
    hints = NO_HINTS
    if isinstance(request, cache_pb.AllocateRequest) and request.HasField("hints"):
        hints = hints_of(request.hints)
    if not request.HasField("namespace"):
        return Prompt(request.token_ids, extra_keys, version, hints=hints)
    namespace = request.namespace
    _refuse_scheme(namespace)
    version = namespace.version or version
    return Prompt(request.token_ids, extra_keys, version, namespace.adapter, namespace.salt, hints)


def hints_of(message: cache_pb.Hints) -> Hints:
    """Returns what a request's caller knows of it; a word that this version does not know says nothing."""
    retention_s = seconds_of("hints.retention", message.retention) if message.HasField("retention") else 0.0
    is_known = message.expected_reuse in cache_pb.ExpectedReuse.values()
    reuse = ExpectedReuse(message.expected_reuse) if is_known else ExpectedReuse.UNKNOWN
    return Hints(message.priority, retention_s, reuse)


def block_run_of(field: str, table: types_pb2.BlockTable) -> BlockRun:
    """Returns blocks with their generations; refuses arrays of different lengths."""
    run = BlockRun(
        integers(f"{field}.block_ids", "I", table.block_ids), integers(f"{field}.generations", "Q", table.generations)
    )
    if len(run.block_ids) != len(run.generations):
        raise InvalidField(
            field=field,
            value=f"{len(run.block_ids)} blocks with {len(run.generations)} generations",
            limit="a generation for each block",
            remedy="send both arrays in one order",
        )
    return run


def table_message(run: BlockRun) -> types_pb2.BlockTable:
    """Returns blocks as a message."""
    return types_pb2.BlockTable(
        block_ids=little_endian("I", run.block_ids), generations=little_endian("Q", run.generations)
    )


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
        extra_keys=extra_keys_of(item.extra_keys),
        written=written,
        switched=tuple(item.switched_positions),
        known_token_count=item.known_token_count if item.HasField("known_token_count") else None,
        appended=block_run_of("appended", item.appended) if item.HasField("appended") else None,
    )


def held_of(item: cache_pb.HeldSequence, number: int) -> Held:
    """Returns a sequence as its session has it; `number` is that of its handle."""
    sequence = item.sequence
    _refuse_scheme(item.namespace)
    return Held(
        number=number,
        block_ids=integers("sequence.table.block_ids", "I", sequence.table.block_ids),
        generations=integers("sequence.table.generations", "Q", sequence.table.generations),
        cached_tokens=sequence.cached_tokens,
        computed_tokens=sequence.computed_tokens,
        token_count=sequence.token_count,
        committed_tokens=item.committed_tokens,
        tail_token_ids=item.tail_token_ids,
        extra_keys=extra_keys_of(item.extra_keys),
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


def put_shadows(messages: MutableSequence[cache_pb.Shadow], shadows: Sequence[Shadow]) -> Steps[None]:
    """Appends shadows as messages, a slice at a time."""
    for start in range(0, len(shadows), _SHADOWS_A_SLICE):
        if start:
            yield
        messages.extend([shadow_message(one) for one in shadows[start : start + _SHADOWS_A_SLICE]])


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


def _refuse_scheme(namespace: types_pb2.NamespaceKey) -> None:
    if namespace.scheme:
        raise InvalidField(
            field="namespace.scheme",
            value=f"{len(namespace.scheme)} characters long",
            limit="empty, where blocks are told by their tokens",
            remedy="use block calls",
        )


def extra_keys_of(messages: Sequence[types_pb2.ExtraKey]) -> tuple[ExtraKey, ...]:
    """Returns extra keys, or refuses too many."""
    validate.listed("extra_keys", len(messages), validate.MAX_EXTRA_KEYS)
    return tuple([ExtraKey(key.token_offset, key.value) for key in messages])
