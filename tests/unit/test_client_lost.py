"""What a client cannot go on with: a sequence or a session that the next process does not take up, and no process."""

import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import pytest

from fake_process import peek
from fake_service import FakeService
from integration.client_kinds import Connect
from integration.client_worker import LAYOUT
from kvharbor.client import CommitResult, Harbor, Pool, SequenceLost, SessionLost, connect
from kvharbor.v1 import errors_pb2, types_pb2
from moments import once
from waiting import until


def test_a_sequence_that_the_next_process_refuses_is_lost(service: FakeService, pool: Pool) -> None:
    """Its next use says why; the others go on; releasing it is quiet."""
    lost, kept = pool.allocate(range(16)), pool.allocate(range(16))
    service.held.refuse_resume[lost.id] = types_pb2.ItemStatus(
        code=9, reason=errors_pb2.ERROR_REASON_STALE_GENERATION, message="stale", metadata={"blockId": "3"}
    )
    service.restart()
    service.wait_until_resumed()
    until(lambda: lost.ended)
    uses: tuple[Callable[[], Any], ...] = (
        lambda: lost.commit(16),
        lambda: lost.extend(1),
        lambda: lost.slots(0, 1),
        lambda: lost.fork(1),
        lambda: lost.handoff(16),
    )
    for use in uses:
        with pytest.raises(SequenceLost, match="STALE_GENERATION: stale") as error:
            use()
        assert (error.value.metadata["cause"], error.value.metadata["blockId"]) == ("STALE_GENERATION", "3")
    lost.release()
    assert kept.commit(16) == CommitResult(16)
    kept.release()


def test_a_batch_goes_on_without_what_was_lost(service: FakeService, pool: Pool) -> None:
    """A sequence that is lost while its commit waits is refused alone."""
    lost, kept = pool.allocate(range(16)), pool.allocate(range(16))
    service.held.refuse_resume[lost.id] = types_pb2.ItemStatus(
        code=9, reason=errors_pb2.ERROR_REASON_STALE_GENERATION, message="stale"
    )

    def end_and_come_back() -> None:
        service.blink()
        service.wait_until_resumed()

    once(service.after, "Commit", end_and_come_back)
    refused, done = pool.commit_many([(lost, 16), (kept, 16)])  # type: ignore[list-item]
    assert type(refused) is SequenceLost
    assert done == CommitResult(16)
    kept.release()


def test_where_nobody_listens_any_more_the_session_is_over(open_harbor: Connect, service: FakeService) -> None:
    """The listener belongs to what keeps the state: there is nothing to wait for. Releases and close are quiet."""
    harbor = open_harbor(service.target)
    pool = harbor.open_pool("p", LAYOUT)
    held = pool.allocate(range(16))
    service.leave()
    for lost in (lambda: pool.allocate(range(3)), pool.stats, harbor.server_info):
        with pytest.raises(SessionLost, match="connect again"):
            lost()
    held.release()
    assert held.ended


def test_a_session_that_the_next_process_does_not_know_is_lost(service: FakeService, pool: Pool) -> None:
    """A refusal that no waiting mends."""
    pool.link.session = _with_token(pool.link.session, "unknown")
    service.restart()
    with pytest.raises(SessionLost):
        until(lambda: pool.stats() is None)


def _with_token(session: Any, token: str) -> Any:
    return dataclasses.replace(session, resume_token=token)


def test_a_forgotten_harbor_ends_its_session(service: FakeService) -> None:
    """The thread that watches the side socket does not keep it alive."""
    harbor: Harbor | None = connect(service.target)
    connection = service.accepted[0]
    connection.setblocking(False)
    assert harbor is not None
    del harbor
    gc.collect()
    until(lambda: peek(connection) == b"")
