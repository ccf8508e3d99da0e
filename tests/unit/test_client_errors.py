"""The client's error tree, and what becomes one of its classes."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from kvharbor import client
from kvharbor.client import errors, refusals
from kvharbor.client.errors import HarborError
from kvharbor.v1 import errors_pb2, side_pb2, types_pb2

# Made by the client itself; the service knows nothing of them.
LOCAL_REASONS = {
    "DEADLINE_EXCEEDED",
    "EPOCH_ENDED",
    "HARBOR_CLOSED",
    "MESSAGE_TOO_LARGE",
    "POOL_AMBIGUOUS",
    "SEQUENCE_ENDED",
    "SEQUENCE_IN_DOUBT",
    "SEQUENCE_LOST",
    "SERVICE_AWAY",
    "SERVICE_UNREACHABLE",
}


class FailedCall(grpc.RpcError):
    """What gRPC raises, as far as the client asks it."""

    def __init__(self, code: grpc.StatusCode, details: str, *infos: Message) -> None:
        self._code, self._details = code, details
        status = status_pb2.Status(code=code.value[0], message=details)
        for info in infos:
            packed = any_pb2.Any()
            packed.Pack(info)
            status.details.append(packed)
        self._trailers = (("grpc-status-details-bin", status.SerializeToString()),) if infos else ()

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Any:
        return self._trailers


def tree(parent: type[HarborError] = HarborError) -> Iterator[type[HarborError]]:
    for child in parent.__subclasses__():
        yield child
        yield from tree(child)


LEAVES = [kind for kind in tree() if kind.reason]
WIRE_REASONS = {
    name.removeprefix("ERROR_REASON_")
    for name in errors_pb2.ErrorReason.DESCRIPTOR.values_by_name
    if name != "ERROR_REASON_UNSPECIFIED"
}


def refusal(failure: FailedCall) -> HarborError:
    return refusals.from_rpc(failure, address="unix:/somewhere", timeout_s=1.0)


def test_every_reason_of_the_api_has_a_class_and_no_two_share_one() -> None:
    """The tree is complete against errors.proto; beyond it there are only the reasons that the client makes."""
    reasons = [kind.reason for kind in LEAVES]
    assert sorted(WIRE_REASONS | LOCAL_REASONS) == sorted(reasons)


def test_the_tree_is_drawn_where_it_is_defined_and_exported() -> None:
    """Each class stands in the drawing at the top of errors.py and can be imported from the package."""
    kinds: list[type[HarborError]] = [HarborError, *tree()]
    assert [kind.__name__ for kind in kinds if kind.__name__ not in (errors.__doc__ or "")] == []
    assert [kind.__name__ for kind in kinds if kind.__name__ not in client.__all__] == []


@pytest.mark.parametrize("kind", LEAVES, ids=lambda kind: kind.reason)
def test_a_status_with_details_becomes_the_class_of_its_reason(kind: type[HarborError]) -> None:
    """Reason, message, metadata and retry time all arrive."""
    info = error_details_pb2.ErrorInfo(domain="kvharbor", reason=kind.reason, metadata={"neededBlockCount": "7"})
    retry = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=1, nanos=500_000_000))
    error = refusal(FailedCall(kind.code, "it does not fit", info, retry))
    assert kind is type(error)
    assert (kind.reason, kind.code, "it does not fit") == (error.reason, error.code, str(error))
    assert (error.metadata, error.retry_after_s) == ({"neededBlockCount": "7"}, 1.5)


@pytest.mark.parametrize("name", sorted(WIRE_REASONS))
def test_an_item_and_the_side_socket_are_refused_with_the_same_classes(name: str) -> None:
    """ItemStatus and Refused carry the enum's number instead of its name."""
    number = errors_pb2.ErrorReason.Value(f"ERROR_REASON_{name}")
    status = types_pb2.ItemStatus(code=9, reason=number, message="no", metadata={"a": "1"})
    refused = side_pb2.Refused(reason=number, message="no", metadata={"a": "1"})
    for error in (refusals.from_item(status), refusals.from_refused(refused)):
        assert (name, "no", {"a": "1"}) == (error.reason, str(error), error.metadata)
        assert type(error) in LEAVES


def test_an_item_says_when_to_try_again() -> None:
    """retry_delay becomes retry_after_s, and stays None where the service says nothing."""
    full = types_pb2.ItemStatus(code=8, reason=errors_pb2.ERROR_REASON_POOL_EXHAUSTED)
    assert refusals.from_item(full).retry_after_s is None
    full.retry_delay.FromMilliseconds(250)
    assert refusals.from_item(full).retry_after_s == 0.25


@pytest.mark.parametrize(
    ("code", "group"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, errors.CallerMistake),
        (grpc.StatusCode.OUT_OF_RANGE, errors.CallerMistake),
        (grpc.StatusCode.FAILED_PRECONDITION, errors.StateRefused),
        (grpc.StatusCode.ABORTED, errors.StateRefused),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.Full),
        (grpc.StatusCode.NOT_FOUND, errors.Gone),
        (grpc.StatusCode.UNAVAILABLE, errors.Unavailable),
        (grpc.StatusCode.INTERNAL, errors.ServiceBug),
        (grpc.StatusCode.DATA_LOSS, errors.ServiceBug),
    ],
)
def test_a_reason_that_is_newer_than_this_client_becomes_the_group_of_its_code(
    code: grpc.StatusCode, group: type[HarborError]
) -> None:
    """The unknown reason itself is kept for the caller to read."""
    info = error_details_pb2.ErrorInfo(domain="kvharbor", reason="MOON_TOO_FULL")
    error = refusal(FailedCall(code, "no", info))
    assert (group, "MOON_TOO_FULL", code) == (type(error), error.reason, error.code)


def test_an_unknown_number_of_a_reason_becomes_the_group_of_its_code() -> None:
    """An item of a newer service has no name here, only a number."""
    newer = types_pb2.ItemStatus.FromString(types_pb2.ItemStatus(code=9).SerializeToString() + b"\x10\x8f\x4e")
    error = refusals.from_item(newer)
    assert (errors.StateRefused, "REASON_9999") == (type(error), error.reason)


def test_a_service_that_is_not_there_is_named_with_the_remedy() -> None:
    """UNAVAILABLE without details comes from the transport: nobody answers."""
    error = refusal(FailedCall(grpc.StatusCode.UNAVAILABLE, "connection refused"))
    assert errors.ServiceUnreachable is type(error)
    assert "unix:/somewhere" in str(error)
    assert "kvharbor serve" in str(error)
    assert error.outcome_unknown


def test_details_of_somebody_else_are_not_taken_for_ours() -> None:
    """A proxy between may send ErrorInfo of its own domain."""
    info = error_details_pb2.ErrorInfo(domain="example.org", reason="POOL_EXHAUSTED")
    error = refusal(FailedCall(grpc.StatusCode.UNAVAILABLE, "no route", info))
    assert errors.ServiceUnreachable is type(error)


def test_a_message_that_the_transport_refuses_is_not_a_full_pool() -> None:
    """RESOURCE_EXHAUSTED without a reason is about the message's size."""
    error = refusal(FailedCall(grpc.StatusCode.RESOURCE_EXHAUSTED, "message larger than max"))
    assert errors.MessageTooLarge is type(error)


def test_an_unanswered_call_names_its_deadline() -> None:
    """DEADLINE_EXCEEDED leaves the outcome unknown."""
    error = refusal(FailedCall(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))
    assert errors.DeadlineExceeded is type(error)
    assert "1.0 s" in str(error)
    assert error.outcome_unknown
