"""Calls whose answer does not come, or comes from a process that has ended [C5], or that wait for the next one."""

import threading
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fake_service import DEADLINE_S, FakeService
from integration.client_kinds import Connect
from integration.client_worker import LAYOUT
from kvharbor.client import (
    CommitBackwards,
    CommitResult,
    CursorOutOfRange,
    DeadlineExceeded,
    Pool,
    SequenceInDoubt,
    SequenceLost,
    ServiceAway,
    ServiceUnreachable,
    connect,
)
from kvharbor.v1 import errors_pb2, types_pb2
from moments import answered, hurried, once, wait_for
from waiting import quickest, seconds, until

ROUNDED_S = 0.001


def ids(*tokens: int) -> bytes:
    return array("I", tokens).tobytes()


def test_calls_that_need_the_service_wait_for_it(open_harbor: Connect, service: FakeService) -> None:
    """Up to their deadline or `away_wait_s`; the error names how long it has been away."""
    pool = open_harbor(service.target).open_pool("p", LAYOUT)
    hasty = open_harbor(service.target, away_wait_s=0.0).open_pool("p", LAYOUT)
    held = pool.allocate(range(16))
    killed_at = time.monotonic()
    service.kill()
    until(lambda: held.commit(0).pending is not False)
    with hurried(pool, 0.05):
        for call in (lambda: pool.allocate(range(3)), lambda: held.extend(16), lambda: held.fork(1), pool.stats):
            with pytest.raises(ServiceAway) as away:
                call()
            away_s = float(away.value.metadata["awayS"])
            assert f"away for {away_s:.3f} s" in str(away.value)
            assert 0.05 - ROUNDED_S < away_s < time.monotonic() - killed_at + ROUNDED_S

    def refused() -> None:
        with pytest.raises(ServiceAway):
            hasty.stats()

    assert quickest(lambda: seconds(refused), 0.2) < 0.2
    service.begin()
    until(lambda: answered(pool))
    held.release()


def test_a_waiting_call_is_sent_when_the_service_is_back(service: FakeService, pool: Pool) -> None:
    """Nothing was sent before, so it is as if it had been made later."""
    service.kill()
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(pool.allocate, range(16))
        until(lambda: bool(pool.link._changed._waiters))  # type: ignore[attr-defined]
        service.begin()
        waiting.result(DEADLINE_S).release()
    assert len(service.calls["Allocate"]) == 1


def test_a_commit_under_way_when_the_process_ends_is_taken_in_here(open_harbor: Connect, service: FakeService) -> None:
    """Whether it took effect does not matter: the next process is told how things stand."""
    pool = open_harbor(service.target).open_pool("p", LAYOUT)
    held = pool.allocate(range(16), reserve_tokens=16)
    once(service.after, "Commit", service.kill)
    assert held.commit(16, [5]) == CommitResult(0, pending=True)
    assert held.token_count == 17
    service.begin()
    assert pool.stats().sequence_count == 1
    assert service.wait_until_resumed().sequences[0].tail_token_ids == ids(*range(16), 5)
    held.release()


@pytest.mark.parametrize("method", ["Allocate", "Commit", "Extend", "Fork", "Release", "Handoff"])
def test_an_answer_of_a_process_that_has_ended_is_not_taken_in(service: FakeService, pool: Pool, method: str) -> None:
    """The next process has been told how things stood before it, so the same call is sent again and has one effect."""
    held = pool.allocate(range(16), reserve_tokens=16)
    calls: dict[str, Callable[[], Any]] = {
        "Allocate": lambda: pool.allocate(range(4), request_id="again"),
        "Commit": lambda: held.commit(16, [5]),
        "Extend": lambda: held.extend(16),
        "Fork": lambda: held.fork(2),
        "Release": held.release,
        "Handoff": lambda: held.handoff(16),
    }
    service.calls.clear()

    def end_and_come_back() -> None:
        service.blink()
        service.wait_until_resumed()

    once(service.after, method, end_and_come_back)
    result = calls[method]()
    first, second = service.calls[method]
    assert first == second
    made = result if isinstance(result, list) else [result] if method == "Allocate" else []
    for sequence in made:
        assert sequence.id in service.sequences
    if method == "Commit":
        assert (held.token_count, service.sequences[held.id].token_count) == (17, 17)
    if method == "Extend":
        assert len(service.sequences[held.id].table.block_ids) // 4 == len(held.table) == 3
    if method == "Release":
        assert held.id not in service.sequences
    for sequence in (*made, held):
        sequence.release()


def test_a_bad_commit_is_refused_while_the_service_is_away(service: FakeService, pool: Pool) -> None:
    """As the service would: told to the next process it would cost the whole sequence."""
    held = pool.allocate(range(16))
    held.commit(8)
    service.kill()
    until(lambda: held.commit(8).pending)
    with pytest.raises(CommitBackwards):
        held.commit(7)
    for computed_tokens, new_tokens in ((17, ()), (16, range(17))):
        with pytest.raises(CursorOutOfRange):
            held.commit(computed_tokens, new_tokens)
    assert (held.computed_tokens, held.token_count) == (8, 16)
    service.begin()
    service.wait_until_resumed()
    held.release()


@pytest.mark.parametrize("took_effect", [False, True])
def test_a_commit_without_an_answer_is_carried_by_the_next(
    open_harbor: Connect, service: FakeService, took_effect: bool
) -> None:
    """C5: it has not moved token_count, so its tokens are named again; they have one effect, whatever it had."""
    pool = open_harbor(service.target).open_pool("p", LAYOUT)
    hooks = service.after if took_effect else service.before
    answered = threading.Event()
    held = pool.allocate(range(16), reserve_tokens=16)
    once(hooks, "Commit", wait_for(answered))
    with hurried(pool), pytest.raises(DeadlineExceeded):
        held.commit(16, [5, 6])
    answered.set()
    assert held.token_count == 16
    uses: list[Callable[[], Any]] = [lambda: held.fork(1), lambda: held.commit(17, [6])]
    for use in uses:
        with pytest.raises(SequenceInDoubt):
            use()
    assert held.commit(19, [5, 6, 7]) == CommitResult(16)
    assert (held.token_count, service.sequences[held.id].token_count) == (19, 19)
    held.release()


def test_a_commit_without_an_answer_may_just_be_repeated(service: FakeService) -> None:
    """C5: the same item, sent once more."""
    answered = threading.Event()
    with connect(service.target) as harbor:
        pool = harbor.open_pool("p", LAYOUT)
        held = pool.allocate(range(16), reserve_tokens=16)
        once(service.after, "Commit", wait_for(answered))
        with hurried(pool), pytest.raises(DeadlineExceeded):
            held.commit(16, [5, 6])
        answered.set()
        assert held.commit(16, [5, 6]) == CommitResult(16)
        first, second = service.calls["Commit"]
        assert first == second
        assert (held.token_count, service.sequences[held.id].token_count) == (18, 18)
        held.release()


def test_a_hand_off_without_an_answer_may_be_repeated_or_released(service: FakeService) -> None:
    """C5: nothing else, as it may be another's already."""
    answered = threading.Event()
    with connect(service.target) as harbor:
        pool = harbor.open_pool("p", LAYOUT)
        held = pool.allocate(range(16))
        once(service.after, "Handoff", wait_for(answered))
        with hurried(pool), pytest.raises(DeadlineExceeded):
            held.handoff(16)
        answered.set()
        touching = (held.require_held, lambda: held.slots(0, 1))
        for use in (*touching, lambda: held.commit(16), lambda: held.extend(1), lambda: held.fork(1)):
            with pytest.raises(SequenceInDoubt, match="hand it off again"):
                use()
        assert held.handoff(16) == f"token of {held.id}"
        first, second = service.calls["Handoff"]
        assert first == second


def test_a_hand_off_that_took_effect_in_a_process_that_died_has_ended_the_sequence(
    open_harbor: Connect, service: FakeService
) -> None:
    """C5: its token has ended with the process, and the next one has nothing of it to give away; the caller is told."""
    held = open_harbor(service.target).open_pool("p", LAYOUT).allocate(range(20))
    service.held.refuse_resume[held.id] = types_pb2.ItemStatus(
        code=9, reason=errors_pb2.ERROR_REASON_STALE_GENERATION, message="not its own any more"
    )

    def given_and_dead() -> None:
        service.after.clear()
        del service.sequences[held.id]
        service.restart()

    service.after["Handoff"] = given_and_dead
    with pytest.raises(SequenceLost, match="not its own any more"):
        held.handoff(20)
    assert (held.ended, held.leaving) == (True, True)


def test_an_unwarm_under_way_is_not_sent_again(service: FakeService, pool: Pool) -> None:
    """C8: a second one would say that there is no such pin."""
    service.after["Unwarm"] = service.restart
    with pytest.raises(ServiceUnreachable):
        pool.unwarm("x")
    assert len(service.calls["Unwarm"]) == 1
