"""Calls of the C++ client that end without an answer: what is said of them, and what a sequence is good for then."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from cpp_worker import CppError, CppWorker
from fake_process import abort
from fake_service import FakeService
from integration.client_worker import LAYOUT, pool_size
from moments import GIVEN_UP_S, once, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeService]:
    """A service whose process ends when the test wants."""
    service = FakeService(tmp_path, LAYOUT, 16)
    yield service
    service.close()


@pytest.fixture
def worker(fake: FakeService) -> Iterator[CppWorker]:
    """A worker with a sequence of one full block, whose calls are given up soon."""
    with CppWorker.connected(fake.path, timeout_s=GIVEN_UP_S) as worker:
        worker.open("p", LAYOUT.model, 1, pool_size(16))
        worker.allocate("a", 0, 0, *range(16))
        yield worker


def outgrow(fake: FakeService, worker: CppWorker) -> None:
    """Has an extend take effect that is given up before it is answered."""
    given_up = threading.Event()
    once(fake.after, "Extend", wait_for(given_up))
    with pytest.raises(CppError) as late:
        worker.extend("a", 16)
    given_up.set()
    assert (late.value.reason, late.value.outcome_unknown) == ("DEADLINE_EXCEEDED", True)


@pytest.mark.parametrize("by", ["extend", "restart"])
def test_room_that_only_the_service_knows_of_is_not_used(fake: FakeService, worker: CppWorker, by: str) -> None:
    """C5: its next process is told of the table that is known here; an extend of any length brings that up to date."""
    outgrow(fake, worker)
    (there,) = fake.sequences.values()
    assert (there.capacity_tokens, worker.show("a")["capacity_tokens"]) == (32, 16)
    with pytest.raises(CppError) as beyond:
        worker.commit("a", 16, 5)
    refusal = beyond.value
    assert (refusal.kind, refusal.reason, refusal.outcome_unknown) == ("CallerMistake", "CURSOR_OUT_OF_RANGE", False)
    assert "token_count would be 17, at most 16 is possible; extend the sequence first" in str(refusal)
    assert (refusal.metadata["value"], refusal.metadata["limit"]) == ("17", "16")
    assert "Commit" not in fake.calls
    if by == "restart":
        fake.restart()
        assert worker.stats()["sequences"] == 1
    assert worker.extend("a", 0 if by == "extend" else 1)["capacity_tokens"] == 32
    assert worker.commit("a", 16, 5) == 16


def test_nor_is_it_handed_off(fake: FakeService, worker: CppWorker) -> None:
    """C5: a hand-off commits."""
    outgrow(fake, worker)
    with pytest.raises(CppError) as beyond:
        worker.handoff("a", 16, 5)
    assert beyond.value.reason == "CURSOR_OUT_OF_RANGE"
    assert "Handoff" not in fake.calls
    assert worker.handoff("a", 16)


def test_a_commit_without_an_answer_is_repeated_before_one_that_there_is_no_room_for(
    fake: FakeService, worker: CppWorker
) -> None:
    """C5: it has its one effect, and the doubt ends."""
    given_up = threading.Event()
    worker.allocate("b", 0, 0, *range(12))
    once(fake.before, "Commit", wait_for(given_up))
    with pytest.raises(CppError):
        worker.commit("b", 12, 1, 2)
    given_up.set()
    with pytest.raises(CppError) as beyond:
        worker.commit("b", 12, *range(1, 10))
    assert beyond.value.reason == "CURSOR_OUT_OF_RANGE"
    assert worker.show("b")["token_count"] == 14
    worker.fork("b", "c")


@pytest.mark.parametrize("computed_tokens", [10, 17])
def test_a_commit_that_would_be_refused_is_not_told(fake: FakeService, worker: CppWorker, computed_tokens: int) -> None:
    """[L12] Told as taken it would cost the whole sequence."""
    told = []
    held = worker.allocate("b", 16, 0, *range(16))
    worker.commit("b", 16)
    once(fake.before, "Commit", fake.restart)
    once(fake.after, "Resume", lambda: told.append(fake.sequences[held["id"]].computed_tokens))
    worker.commit("b", computed_tokens)
    assert told == [16]


@pytest.mark.parametrize("method", ["commit", "handoff"])
def test_a_refusal_leaves_no_doubt(
    fake: FakeService, worker: CppWorker, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C5: nothing of it was done."""

    def refused(asked: str, request: Any, context: grpc.ServicerContext) -> Any:
        abort(context, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")

    with monkeypatch.context() as patch:
        patch.setattr(fake, "_answered", refused)
        with pytest.raises(CppError) as refusal:
            worker.call(method, "a", 16)
    assert (refusal.value.reason, refusal.value.outcome_unknown) == ("INVALID_FIELD", False)
    worker.fork("a", "c")


@pytest.mark.parametrize("method", ["commit", "extend", "fork", "handoff"])
def test_what_was_not_sent_has_no_effect(fake: FakeService, worker: CppWorker, method: str) -> None:
    """The service was away before."""
    fake.kill()
    with pytest.raises(CppError) as away:
        worker.call(method, "a", 16 if method != "fork" else "b")
    assert (away.value.reason, away.value.outcome_unknown) == ("SERVICE_AWAY", False)
    fake.begin()
    assert worker.stats()["sequences"] == 1
    worker.fork("a", "c")


@pytest.mark.parametrize("method", ["commit", "extend", "fork", "handoff"])
def test_what_was_refused_for_now_has_no_effect_unless_it_is_told(
    fake: FakeService, worker: CppWorker, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C5: the next process is told of a commit or hand-off as taken, so that it is in doubt by then."""
    given_up, answered = threading.Event(), fake._answered

    def end_and_refuse(asked: str, request: Any, context: grpc.ServicerContext) -> Any:
        if asked != "Resume":
            once(fake.before, "Resume", wait_for(given_up))
            fake.blink()
            abort(context, grpc.StatusCode.UNAVAILABLE, "DRAINING")
        return answered(asked, request, context)

    with monkeypatch.context() as patch:
        patch.setattr(fake, "_answered", end_and_refuse)
        with pytest.raises(CppError) as away:
            worker.call(method, "a", 16 if method != "fork" else "b")
    given_up.set()
    told = method in ("commit", "handoff")
    assert (away.value.reason, away.value.outcome_unknown) == ("SERVICE_AWAY", told)
    assert worker.stats()["sequences"] == 1
    with pytest.raises(CppError) if told else contextlib.nullcontext():
        worker.fork("a", "c")


@pytest.mark.parametrize("method", ["commit", "extend", "fork", "handoff"])
def test_what_was_sent_to_a_process_that_has_ended_may_have_effect(
    fake: FakeService, worker: CppWorker, method: str
) -> None:
    """A commit or a hand-off is in doubt then, and nothing else."""
    once(fake.after, method.capitalize(), fake.kill)
    with pytest.raises(CppError) as away:
        worker.call(method, "a", 16 if method != "fork" else "b")
    assert (away.value.reason, away.value.outcome_unknown) == ("SERVICE_AWAY", True)
    fake.begin()
    assert worker.stats()["sequences"] == 1
    if method in ("extend", "fork"):
        worker.fork("a", "c")
    else:
        with pytest.raises(CppError) as doubt:
            worker.fork("a", "c")
        assert doubt.value.reason == "SEQUENCE_IN_DOUBT"
