"""What an error says of a call that the service may have taken before it went away: `outcome_unknown`."""

import threading
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from fake_process import abort
from fake_service import DEADLINE_S, FakeService
from integration.client_kinds import Connect
from integration.client_worker import LAYOUT
from kvharbor.client import Draining, HarborError, ResumeRequired, SequenceInDoubt, ServiceAway, channel
from moments import answered, halt, once
from waiting import until

CALLS: dict[str, Callable[[Any, Any], object]] = {
    "Allocate": lambda pool, _: pool.allocate(range(4)),
    "Extend": lambda _, held: held.extend(16),
    "Fork": lambda _, held: held.fork(1),
    "Handoff": lambda _, held: held.handoff(16),
    "Commit": lambda _, held: held.commit(16),
}


Refusal = tuple[grpc.StatusCode, str]
DRAINING = (grpc.StatusCode.UNAVAILABLE, "DRAINING")
TO_BE_RESUMED = (grpc.StatusCode.FAILED_PRECONDITION, "RESUME_REQUIRED")


def drain(service: FakeService, patch: pytest.MonkeyPatch, refusal: Refusal = DRAINING) -> None:
    """Has the service refuse every call for now, and the client not wait until it is out of time."""
    again = channel.Tries.again

    def refused(method: str, request: Any, context: grpc.ServicerContext) -> Any:
        abort(context, *refusal)

    def last(tries: channel.Tries, error: HarborError, *, to_another: bool) -> bool:
        again(tries, error, to_another=to_another)
        return False

    patch.setattr(service, "_answered", refused)
    patch.setattr(channel.Tries, "again", last)


def in_doubt(held: Any) -> bool:
    """Whether the sequence can only be committed or released."""
    try:
        held.require_usable()
    except SequenceInDoubt:
        return True
    return False


@pytest.mark.parametrize("method", ["Allocate", "Extend", "Fork", "Handoff"])
def test_what_was_not_sent_has_no_effect(open_harbor: Connect, service: FakeService, method: str) -> None:
    """The service was away before."""
    pool = open_harbor(service.target, away_wait_s=0.0).open_pool("p", LAYOUT)
    held = pool.allocate(range(16))
    service.kill()
    until(lambda: not answered(pool))
    with pytest.raises(ServiceAway) as away:
        CALLS[method](pool, held)
    assert (away.value.outcome_unknown, in_doubt(held)) == (False, False)


@pytest.mark.parametrize("method", ["Allocate", "Extend", "Fork", "Handoff"])
def test_what_was_sent_to_a_process_that_has_ended_may_have_effect(
    open_harbor: Connect, service: FakeService, method: str
) -> None:
    """It has broken off, and no other is there."""
    pool = open_harbor(service.target, away_wait_s=0.1).open_pool("p", LAYOUT)
    held = pool.allocate(range(16))
    once(service.after, method, service.kill)
    with pytest.raises(ServiceAway) as away:
        CALLS[method](pool, held)
    assert (away.value.outcome_unknown, in_doubt(held)) == (True, method == "Handoff")


@pytest.mark.parametrize("method", [*CALLS])
def test_what_a_process_has_answered_that_had_ended_may_have_effect(
    open_harbor: Connect, service: FakeService, method: str
) -> None:
    """Its answer is not taken in, and the next one is still being told."""
    telling, go_on = threading.Event(), threading.Event()

    def die() -> None:
        once(service.before, "Resume", halt(telling, go_on))
        service.blink()
        assert telling.wait(DEADLINE_S)

    pool = open_harbor(service.target, away_wait_s=0.1).open_pool("p", LAYOUT)
    held = pool.allocate(range(16))
    once(service.after, method, die)
    with pytest.raises(ServiceAway) as away:
        CALLS[method](pool, held)
    assert (away.value.outcome_unknown, in_doubt(held)) == (True, method in ("Commit", "Handoff"))
    go_on.set()
    until(lambda: answered(pool))


@pytest.mark.parametrize("refusal", [DRAINING, TO_BE_RESUMED])
@pytest.mark.parametrize("method", [*CALLS])
def test_what_is_refused_for_now_has_no_effect_unless_it_is_told(
    open_harbor: Connect, service: FakeService, method: str, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C11: of a commit or hand-off the next process is told as taken, so that it is in doubt by then."""
    pool = open_harbor(service.target).open_pool("p", LAYOUT)
    held = pool.allocate(range(16))
    with monkeypatch.context() as patch:
        drain(service, patch, refusal)
        with pytest.raises((Draining, ResumeRequired)) as draining:
            CALLS[method](pool, held)
    told = method in ("Commit", "Handoff")
    assert (draining.value.outcome_unknown, in_doubt(held)) == (told, told)


@pytest.mark.parametrize("method", ["Allocate", "Extend"])
def test_a_refusal_for_now_says_nothing_of_the_process_before(
    open_harbor: Connect, service: FakeService, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may have taken it."""
    pool = open_harbor(service.target).open_pool("p", LAYOUT)
    held = pool.allocate(range(16))
    with monkeypatch.context() as patch:

        def end_and_drain() -> None:
            service.blink()
            service.wait_until_resumed()
            drain(service, patch)

        once(service.after, method, end_and_drain)
        with pytest.raises(Draining) as draining:
            CALLS[method](pool, held)
    assert draining.value.outcome_unknown
