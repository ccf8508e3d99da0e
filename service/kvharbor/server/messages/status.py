"""Errors as gRPC statuses [S10]: one table from classes to codes, and `google.rpc.Status` with its details."""

from collections.abc import Mapping
from typing import Any, Final, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from kvharbor.gpumem import DeviceNotVisible, GpumemError, InsufficientMemory, LayoutInvalid, LayoutMismatch
from kvharbor.pool import errors as pool_errors
from kvharbor.pool.errors import PoolError
from kvharbor.server import errors as server_errors
from kvharbor.server import session_errors
from kvharbor.server.errors import ServerError
from kvharbor.v1 import errors_pb2, types_pb2

DOMAIN: Final = "kvharbor"
Refusal = PoolError | GpumemError | ServerError

CODES: Final[Mapping[type[Refusal], grpc.StatusCode]] = {
    pool_errors.InvalidField: grpc.StatusCode.INVALID_ARGUMENT,
    LayoutInvalid: grpc.StatusCode.INVALID_ARGUMENT,
    pool_errors.RequestTooLarge: grpc.StatusCode.OUT_OF_RANGE,
    pool_errors.CursorOutOfRange: grpc.StatusCode.OUT_OF_RANGE,
    server_errors.RevisionCompacted: grpc.StatusCode.OUT_OF_RANGE,
    server_errors.PoolNotFound: grpc.StatusCode.NOT_FOUND,
    session_errors.SessionNotFound: grpc.StatusCode.NOT_FOUND,
    server_errors.WarmTaskNotFound: grpc.StatusCode.NOT_FOUND,
    pool_errors.SequenceNotFound: grpc.StatusCode.NOT_FOUND,
    pool_errors.PinNotFound: grpc.StatusCode.NOT_FOUND,
    pool_errors.HandoffNotFound: grpc.StatusCode.NOT_FOUND,
    pool_errors.BlockNotFound: grpc.StatusCode.NOT_FOUND,
    pool_errors.CommitBackwards: grpc.StatusCode.FAILED_PRECONDITION,
    pool_errors.StaleGeneration: grpc.StatusCode.FAILED_PRECONDITION,
    server_errors.StaleEpoch: grpc.StatusCode.FAILED_PRECONDITION,
    LayoutMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    server_errors.PoolSizeMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    server_errors.PoolDevicesMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    server_errors.PoolInUse: grpc.StatusCode.FAILED_PRECONDITION,
    session_errors.ResumeRequired: grpc.StatusCode.FAILED_PRECONDITION,
    session_errors.PeerUnproven: grpc.StatusCode.FAILED_PRECONDITION,
    session_errors.RankTaken: grpc.StatusCode.FAILED_PRECONDITION,
    server_errors.UpgradeFailed: grpc.StatusCode.FAILED_PRECONDITION,
    pool_errors.BlockHeld: grpc.StatusCode.FAILED_PRECONDITION,
    pool_errors.BlockNotHeld: grpc.StatusCode.FAILED_PRECONDITION,
    pool_errors.RequestIdReused: grpc.StatusCode.FAILED_PRECONDITION,
    pool_errors.SequenceBusy: grpc.StatusCode.FAILED_PRECONDITION,
    DeviceNotVisible: grpc.StatusCode.FAILED_PRECONDITION,
    session_errors.MpsClientRefused: grpc.StatusCode.FAILED_PRECONDITION,
    InsufficientMemory: grpc.StatusCode.FAILED_PRECONDITION,
    pool_errors.PoolExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    pool_errors.TablesFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    pool_errors.WarmBudgetExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    server_errors.WatcherTooSlow: grpc.StatusCode.RESOURCE_EXHAUSTED,
    server_errors.TooManyWarmTasks: grpc.StatusCode.RESOURCE_EXHAUSTED,
    server_errors.DescriptorsExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    session_errors.SessionRequired: grpc.StatusCode.UNAUTHENTICATED,
    session_errors.SessionUnknown: grpc.StatusCode.UNAUTHENTICATED,
    session_errors.AdminRequired: grpc.StatusCode.PERMISSION_DENIED,
    server_errors.Starting: grpc.StatusCode.UNAVAILABLE,
    server_errors.Draining: grpc.StatusCode.UNAVAILABLE,
    pool_errors.InvariantViolation: grpc.StatusCode.INTERNAL,
}
REFUSALS: Final = tuple(CODES)
"""What a call may be refused with. Any other error that comes to its end is a bug, though it be of the same roots."""

# What is full now may have room when the next sequences end: soon, but not within a scheduler's step.
_RETRY_DELAYS_S: Final[Mapping[type[Exception], float]] = {
    pool_errors.PoolExhausted: 0.1,
    server_errors.Starting: 0.2,
    server_errors.Draining: 1.0,
}

MAX_DETAIL_BYTES: Final = 4096
"""The transport carries 8 KiB of metadata, and details travel in base64: more would hide the real error."""
_MAX_MESSAGE_CHARS = 512
_MAX_VALUE_CHARS = 256


def reason_of(refusal: Refusal) -> errors_pb2.ErrorReason.ValueType:
    """Returns the refusal's reason as the API's enum."""
    return errors_pb2.ErrorReason.Value(f"ERROR_REASON_{refusal.reason}")


def metadata_of(refusal: Refusal) -> dict[str, str]:
    """Returns the refusal's values as errors.proto lists them, each cut to a length that fits."""
    values = refusal.metadata()
    if isinstance(refusal, LayoutMismatch):
        values = {field: f"{theirs} != {ours}" for field, (ours, theirs) in refusal.differences.items()}
    return {name: _cut(value, _MAX_VALUE_CHARS) for name, value in values.items()}


def item_status(refusal: Refusal) -> types_pb2.ItemStatus:
    """Returns the refusal as the status of one item of a batch."""
    item = types_pb2.ItemStatus(
        code=CODES[type(refusal)].value[0],
        reason=reason_of(refusal),
        message=_cut(str(refusal), _MAX_MESSAGE_CHARS),
        metadata=metadata_of(refusal),
    )
    delay_s = _RETRY_DELAYS_S.get(type(refusal))
    if delay_s is not None:
        item.retry_delay.CopyFrom(_duration(delay_s))
    return item


def rpc_status_of(refusal: Refusal) -> status_pb2.Status:
    """Returns the refusal as `google.rpc.Status` with ErrorInfo, and what else its code calls for."""
    values = metadata_of(refusal)
    status = _status(refusal, values)
    value_chars = _MAX_VALUE_CHARS
    while status.ByteSize() > MAX_DETAIL_BYTES and value_chars > 16:
        value_chars //= 2
        status = _status(refusal, {name: _cut(value, value_chars) for name, value in values.items()})
    while status.ByteSize() > MAX_DETAIL_BYTES and values:
        values.popitem()
        status = _status(refusal, {name: _cut(value, value_chars) for name, value in values.items()})
    return status


async def abort(context: "grpc.aio.ServicerContext[Any, Any]", refusal: Refusal) -> NoReturn:
    """Ends the call with the refusal, behind the trailer that it has."""
    status = rpc_status.to_status(rpc_status_of(refusal))
    await context.abort(status.code, status.details, (*context.trailing_metadata(), *status.trailing_metadata))


def _status(refusal: Refusal, values: dict[str, str]) -> status_pb2.Status:
    status = status_pb2.Status(code=CODES[type(refusal)].value[0], message=_cut(str(refusal), _MAX_MESSAGE_CHARS))
    _add(status, error_details_pb2.ErrorInfo(reason=refusal.reason, domain=DOMAIN, metadata=values))
    delay_s = _RETRY_DELAYS_S.get(type(refusal))
    if delay_s is not None:
        _add(status, error_details_pb2.RetryInfo(retry_delay=_duration(delay_s)))
    if "field" in values and CODES[type(refusal)] is grpc.StatusCode.INVALID_ARGUMENT:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=values["field"], description=f"must be {values.get('limit', '')}; {values.get('remedy', '')}"
        )
        _add(status, error_details_pb2.BadRequest(field_violations=[violation]))
    return status


def _add(
    status: status_pb2.Status,
    detail: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo | error_details_pb2.BadRequest,
) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)


def _duration(delay_s: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(round(delay_s * 1e9))
    return duration


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
