"""Calls of engines that copy: what ends their session for good leaves them without a pool, not without an answer."""

import logging
from collections.abc import Callable
from typing import Any

import pytest

from fake_blocks import FakeCalls, FakeOwner
from kvharbor.client import (
    BlockRun,
    Chain,
    EpochEnded,
    HarborError,
    InsufficientMemory,
    Namespace,
    PoolExhausted,
    PoolSizeMismatch,
    ServiceAway,
    SessionLost,
)
from kvharbor.engines.request_blocks import RequestBlocks
from kvharbor.engines.spared_calls import SparedCalls

ENDS = [SessionLost("ended"), PoolSizeMismatch("another size"), InsufficientMemory("no room")]
CALLS: list[Callable[[SparedCalls], object]] = [
    lambda calls: calls.acquire([Chain(keys=bytes(32))]),
    lambda calls: calls.lease(1, 1),
    lambda calls: calls.commit([]),
    lambda calls: calls.abandon([]),
    lambda calls: calls.release(BlockRun.of(())),
]


class Ended(FakeCalls):
    """Calls of a session that has ended."""

    def __init__(self, error: HarborError) -> None:
        super().__init__(FakeOwner(4, 1))
        self.error = error

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise self.error

    acquire = lease = commit = abandon = release = bump_namespace = _refuse


@pytest.mark.parametrize("end", ENDS, ids=lambda each: type(each).__name__)
def test_a_session_that_has_ended_is_a_pool_without_content_and_room(
    end: HarborError, caplog: pytest.LogCaptureFixture
) -> None:
    """[E16] And it is told once."""
    calls: Any = SparedCalls(Ended(end))  # type: ignore[arg-type]
    with caplog.at_level(logging.ERROR):
        (nothing, more) = calls.acquire([Chain(keys=bytes(32))] * 2)
        assert (len(nothing.held), len(more.held), nothing.refusal) == (0, 0, None)
        with pytest.raises(PoolExhausted):
            calls.lease(0, 1)
        calls.commit([])
        calls.abandon([])
        calls.release(BlockRun.of(()))
        assert calls.leave_version()
    assert [str(end) in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize("call", CALLS)
def test_the_end_of_an_epoch_is_told(call: Callable[[SparedCalls], object]) -> None:
    """It ends all holds, and what comes next is of another epoch."""
    with pytest.raises(EpochEnded):
        call(SparedCalls(Ended(EpochEnded("over"))))  # type: ignore[arg-type]


@pytest.mark.parametrize("call", CALLS[:2])
def test_a_service_that_is_away_is_told(call: Callable[[SparedCalls], object]) -> None:
    """It comes back."""
    with pytest.raises(ServiceAway):
        call(SparedCalls(Ended(ServiceAway("away"))))  # type: ignore[arg-type]


def test_what_a_request_held_ends_with_it() -> None:
    """As it ended at the service."""
    fake = FakeCalls(FakeOwner(4, 1))
    held = RequestBlocks(SparedCalls(fake), Namespace(scheme="s"))  # type: ignore[arg-type]
    table = held.take_some(2)
    assert len(table) == 2
    held._calls = SparedCalls(Ended(SessionLost("ended")))  # type: ignore[arg-type]
    held.publish(table, 0, 1, keys=bytes(32))
    assert held.take_some(2) == []
    held.drop(table)
    assert held.used_count == 0
