"""Turns what the service says no with into the classes of `errors`.

A refusal comes in three forms, with the same reason and metadata in each: the details of a gRPC status, the
status of an item of a batch, and `Refused` on the side socket.
"""

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from kvharbor.client import errors
from kvharbor.client.errors import HarborError
from kvharbor.gpumem import GpumemError
from kvharbor.v1 import errors_pb2, side_pb2, types_pb2

DOMAIN = "kvharbor"
_PREFIX = "ERROR_REASON_"
_CODES = {code.value[0]: code for code in grpc.StatusCode}


def _leaves(parent: type[HarborError]) -> Iterator[type[HarborError]]:
    for child in parent.__subclasses__():
        if child.reason:
            yield child
        yield from _leaves(child)


_BY_REASON = {leaf.reason: leaf for leaf in _leaves(HarborError)}

# What a status means that carries no reason, or one that is newer than this client.
_BY_CODE: dict[grpc.StatusCode, type[HarborError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.CallerMistake,
    grpc.StatusCode.OUT_OF_RANGE: errors.CallerMistake,
    grpc.StatusCode.UNAUTHENTICATED: errors.CallerMistake,
    grpc.StatusCode.PERMISSION_DENIED: errors.CallerMistake,
    grpc.StatusCode.UNIMPLEMENTED: errors.StateRefused,
    grpc.StatusCode.FAILED_PRECONDITION: errors.StateRefused,
    grpc.StatusCode.ABORTED: errors.StateRefused,
    grpc.StatusCode.ALREADY_EXISTS: errors.StateRefused,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Full,
    grpc.StatusCode.NOT_FOUND: errors.Gone,
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
}


def from_rpc(failure: grpc.RpcError, *, address: str, timeout_s: float | None) -> HarborError:
    """Returns the error for a failed call, sync or asyncio: both kinds answer from their own snapshot."""
    code: grpc.StatusCode = failure.code()
    if (details := _details(failure)) is not None:
        info, retry_after_s = details
        return _refusal(info.reason, failure.details(), info.metadata, retry_after_s, code)
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return unreachable(address, failure.details())
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.DeadlineExceeded(
            f"no answer from {address} within {timeout_s} s: give the call a longer timeout, "
            f"or look whether the service is overloaded",
            metadata={"address": address, "timeoutS": str(timeout_s)},
        )
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        # Full pools always name a reason; without one it is the transport that refuses a message.
        return errors.MessageTooLarge(failure.details() or code.name)
    return _refusal("", f"{code.name}: {failure.details()}", {}, None, code)


def from_item(status: types_pb2.ItemStatus) -> HarborError:
    """Returns the error for an item of a batch whose code is not OK."""
    delay = status.retry_delay
    retry_after_s = delay.seconds + delay.nanos / 1e9 if status.HasField("retry_delay") else None
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    return _refusal(_reason_name(status.reason), status.message, status.metadata, retry_after_s, code)


def from_refused(refused: side_pb2.Refused) -> HarborError:
    """Returns the error for a refusal on the side socket."""
    return _refusal(_reason_name(refused.reason), refused.message, refused.metadata, None, None)


def from_memory(failure: GpumemError) -> HarborError:
    """Returns the error for memory that this process cannot map, with the same reason."""
    return _refusal(failure.reason, str(failure), failure.metadata(), None, grpc.StatusCode.FAILED_PRECONDITION)


def unreachable(address: str, cause: object) -> errors.ServiceUnreachable:
    """Returns the error for a service that is not there, with what to do about it."""
    remedy = "start one with `kvharbor serve`, or name its socket in connect() or KVHARBOR_SOCKET"
    return errors.ServiceUnreachable(
        f"no kvharbor service answers at {address} ({cause}): {remedy}",
        metadata={"address": address, "cause": str(cause), "remedy": remedy},
    )


def forbidden(path: str) -> errors.ServiceUnreachable:
    """Returns the error for a socket that this process may not connect to."""
    try:
        found = Path(path).stat()
        access = f"it has mode {stat.S_IMODE(found.st_mode):04o}, uid {found.st_uid}, gid {found.st_gid}"
    except OSError:
        access = "its folder may not be entered"
    return errors.ServiceUnreachable(
        f"uid {os.geteuid()} may not connect to {path}: {access}; run as its user or group, or set socket_mode and "
        f"socket_group of the service",
        metadata={"address": path},
    )


def _refusal(
    reason: str,
    message: str | None,
    metadata: Mapping[str, str],
    retry_after_s: float | None,
    code: grpc.StatusCode | None,
) -> HarborError:
    kind = _BY_REASON.get(reason)
    if kind is None:
        kind = _BY_CODE.get(code or grpc.StatusCode.UNKNOWN, errors.ServiceBug)
    error = kind(message or reason, metadata=metadata, retry_after_s=retry_after_s)
    if reason:
        error.reason = reason
    if code is not None:
        error.code = code
    return error


def _reason_name(value: int) -> str:
    known = errors_pb2.ErrorReason.DESCRIPTOR.values_by_number.get(value)
    if value == errors_pb2.ERROR_REASON_UNSPECIFIED:
        return ""
    return known.name.removeprefix(_PREFIX) if known else f"REASON_{value}"


def _details(failure: grpc.RpcError) -> tuple[error_details_pb2.ErrorInfo, float | None] | None:
    try:
        status: status_pb2.Status | None = rpc_status.from_call(failure)
    except (ValueError, DecodeError):
        # Details that contradict their status are not ours; the status itself still tells enough.
        return None
    if status is None:
        return None
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    retry_after_s = None
    for detail in status.details:
        if detail.Is(retry.DESCRIPTOR) and detail.Unpack(retry):
            retry_after_s = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
        elif detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
    return (info, retry_after_s) if info.domain == DOMAIN else None
