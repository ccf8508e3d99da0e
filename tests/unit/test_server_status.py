"""Every refusal has a code and a reason of its own, and fits into the metadata of a call."""

from collections.abc import Iterator

import pytest
from google.rpc import error_details_pb2

from kvharbor.gpumem import (
    ArenaClosed,
    ArenaTooSmall,
    ArenaUnfit,
    ArenaUnproven,
    CopyConflict,
    CudaRuntimeUnknown,
    CudaUnavailable,
    DeviceFailed,
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
from kvharbor.pool.errors import InvalidField, PoolError, PoolExhausted
from kvharbor.server.errors import PoolInUse, PoolNotFound, ServerError
from kvharbor.server.messages.status import (
    CODES,
    MAX_DETAIL_BYTES,
    REFUSALS,
    item_status,
    metadata_of,
    reason_of,
    rpc_status_of,
)
from kvharbor.v1 import errors_pb2

NEVER_ON_THE_WIRE = {
    ArenaClosed,
    ArenaTooSmall,
    ArenaUnfit,
    ArenaUnproven,
    CopyConflict,
    CudaRuntimeUnknown,
    CudaUnavailable,
    DeviceFailed,
    IpcRefused,
    MappingInUse,
    OutOfBounds,
    PlaneUnknown,
    ReservationCancelled,
    ViewUnavailable,
}
"""Of the memory's errors: those of the attaching side, and those that the service answers in other words, or by its
end."""


def leaves(root: type[Exception]) -> Iterator[type[Exception]]:
    """Yields the classes of a tree that have no subclasses."""
    below = root.__subclasses__()
    if not below:
        yield root
    for each in below:
        yield from leaves(each)


def below(root: type[Exception]) -> Iterator[type[Exception]]:
    """Yields every subclass, at any depth."""
    for each in root.__subclasses__():
        yield each
        yield from below(each)


ROOTS = (PoolError, GpumemError, ServerError)
ALL = {each for root in ROOTS for each in leaves(root)} - NEVER_ON_THE_WIRE


def test_every_error_has_a_code_and_no_code_is_for_nothing() -> None:
    """A new class without an entry would end a call as an internal error."""
    assert set(CODES) == ALL


def test_what_is_caught_as_a_refusal_has_a_code() -> None:
    """Others of the same roots end a call as any bug does: none of them is taken for a refusal, and then not found."""
    caught = {each for root in ROOTS for each in (root, *below(root)) if issubclass(each, REFUSALS)}
    assert caught == set(CODES)


def test_no_two_errors_share_a_reason_and_each_is_in_the_api() -> None:
    """Clients tell errors apart by their reason alone."""
    reasons = [each.reason for each in ALL]  # type: ignore[attr-defined]
    known = {name.removeprefix("ERROR_REASON_") for name in errors_pb2.ErrorReason.keys()}  # noqa: SIM118
    assert len(set(reasons)) == len(reasons)
    assert set(reasons) - known == set()
    assert known - set(reasons) == {"UNSPECIFIED"}


def test_a_full_pool_says_when_to_come_again() -> None:
    """RESOURCE_EXHAUSTED carries RetryInfo, in a status and in an item."""
    names = ("needed", "available", "usable", "free", "cached", "reserved", "active", "warm", "quarantined")
    refusal = PoolExhausted(**{f"{name}_block_count": 1 for name in names})
    status = rpc_status_of(refusal)
    retry = error_details_pb2.RetryInfo()
    assert [detail.Unpack(retry) for detail in status.details] == [False, True]
    assert retry.retry_delay.nanos == item_status(refusal).retry_delay.nanos > 0


def test_a_bad_argument_names_its_field() -> None:
    """INVALID_ARGUMENT carries BadRequest."""
    refusal = InvalidField(field="token_ids", value="empty", limit="at least one token", remedy="send one")
    bad = error_details_pb2.BadRequest()
    assert [detail.Unpack(bad) for detail in rpc_status_of(refusal).details] == [False, True]
    assert bad.field_violations[0].field == "token_ids"


@pytest.mark.parametrize(
    ("names", "count", "told"),
    [
        ([], 0, ""),
        (["a"], 1, "'a'"),
        (["a", "b, c"], 2, "'a', 'b, c'"),
        (["a", "b"], 9, "'a', 'b' and 7 more"),
        (["x" * 128, "y" * 128], 250_000, f"'{'x' * 128}' and 249999 more"),
        (["\0" * 128], 1, ""),
    ],
)
def test_pins_that_keep_a_pool_are_named_as_far_as_there_is_room(names: list[str], count: int, told: str) -> None:
    """Neither they nor the remedy behind them are cut, however long the names are."""
    held = 2**31 - 1
    refusal = PoolInUse(
        session_count=held, sequence_count=held, pin_count=count, held_block_count=held, pin_names=names
    )
    item = item_status(refusal)
    assert (item.metadata.get("pinNames", ""), item.message) == (told, str(refusal))
    assert (f" ({told})" in item.message) == bool(told)


def test_a_layout_that_differs_has_a_key_for_every_field() -> None:
    """Metadata as errors.proto says: theirs != ours."""
    refusal = LayoutMismatch({"model": ("a", "b"), "planes.k.page_bytes": ("1024", "2048")})
    assert metadata_of(refusal) == {"model": "b != a", "planes.k.page_bytes": "2048 != 1024"}


@pytest.mark.parametrize(
    "refusal",
    [
        PoolNotFound("p" * 100_000),
        LayoutMismatch({f"planes.p{index}.model": ("é" * 300, "ü" * 300) for index in range(200)}),
        LayoutInvalid("f" * 10_000, "v" * 10_000, "l" * 10_000, "r" * 10_000),
    ],
)
def test_details_never_outgrow_the_transport(refusal: PoolError | GpumemError | ServerError) -> None:
    """Beyond 8 KiB of metadata the transport itself would answer, with another error."""
    status = rpc_status_of(refusal)
    assert status.ByteSize() <= MAX_DETAIL_BYTES
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain) == (refusal.reason, "kvharbor")


def test_reasons_travel_as_the_enum() -> None:
    """ItemStatus and the side socket carry numbers."""
    refusal = InsufficientMemory(2, available_bytes=1, limited_by="MemAvailable")
    assert reason_of(refusal) == errors_pb2.ERROR_REASON_INSUFFICIENT_MEMORY
    assert item_status(refusal).metadata == {
        "neededBytes": "2",
        "availableBytes": "1",
        "limitedBy": "MemAvailable",
    }
