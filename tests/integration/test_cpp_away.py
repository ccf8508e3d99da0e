"""The C++ client while its service is away, and with the next process."""

import contextlib
import os
import signal
import threading
from array import array
from pathlib import Path

import pytest

from cpp_worker import CppError, CppWorker
from fake_service import DEADLINE_S, FakeService
from integration.client_worker import LAYOUT, pool_size, read
from integration.cpp_sessions import StartWorker
from kvharbor.client import connect
from moments import GIVEN_UP_S, once, wait_for
from service_process import ServiceProcess
from waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_session_goes_on_with_the_next_process(service: ServiceProcess, start_worker: StartWorker) -> None:
    """G7: what is held is told to it by the next call, whichever that is; a release needs nobody."""
    worker = start_worker(service, "p", block_count=16)
    for name, first in (("a", 0), ("b", 100), ("c", 200)):
        worker.allocate(name, 16, 0, *range(first, first + 20))
    worker.stamp("a", 0, *range(20))
    assert worker.commit("a", 20) == 16
    service.restart_child()
    assert worker.commit("a", 32, *range(20, 32)) == 32
    service.restart_child()
    worker.release("b")
    assert worker.stats()["sequences"] == 2
    assert worker.commit("c", 20) == 16
    service.kill_child()
    assert worker.extend("c", 32)["capacity_tokens"] == 80
    assert worker.read("a", 0, 20) == list(range(20))
    worker.release("c")
    with connect(service.target) as harbor:
        pool = harbor.open_pool("p", LAYOUT)
        assert pool.stats().sequence_count == 1
        with pool.allocate(range(32)) as held:
            assert read(pool, held, 0, 16) == list(range(16))


def test_threads_share_a_harbor_through_restarts(service: ServiceProcess, start_worker: StartWorker) -> None:
    """C10: no call fails, no byte is wrong, and nothing is held at the end."""
    worker = start_worker(service, "p", block_count=16)
    worker.begin("hammer", 4, 100)
    for _ in range(2):
        service.restart_child()
    assert worker.answer() == 4 * 100 * 32
    stats = worker.stats()
    assert (stats["free"], stats["sequences"]) == (8, 0)


def test_a_service_that_does_not_come_back_is_away(service: ServiceProcess, start_worker: StartWorker) -> None:
    """Calls end in time with what to do; a service without state is another one, and the session is over."""
    worker = start_worker(service, "p", timeout_s=GIVEN_UP_S)
    worker.allocate("a", 0, 0, *range(16))
    service.kill()
    with pytest.raises(CppError, match="has been away") as away:
        worker.commit("a", 16)
    assert (away.value.kind, away.value.reason) == ("Unavailable", "SERVICE_AWAY")
    with ServiceProcess(service.socket, "--memory=64MiB") as successor:
        successor.wait_for("ready")
        for _ in range(2):
            with pytest.raises(CppError, match="connect again") as lost:
                worker.commit("a", 16)
            assert lost.value.kind == "SessionGone"
        worker.release("a")
        assert worker.end() == 0
        assert successor.stop() == 0


def test_a_commit_without_an_answer_is_repeated_and_counts_once(
    service: ServiceProcess, start_worker: StartWorker
) -> None:
    """C5: until then the sequence is in doubt, and other tokens are refused."""
    worker = start_worker(service, "p", timeout_s=GIVEN_UP_S)
    worker.allocate("a", 32, 0, *range(10))
    worker.commit("a", 10)
    os.kill(service.child_pid, signal.SIGSTOP)
    try:
        with pytest.raises(CppError) as late:
            worker.commit("a", 16, *range(10, 16))
        assert (late.value.kind, late.value.reason) == ("Unavailable", "DEADLINE_EXCEEDED")
        for operation in (("fork", "a", "b"), ("commit", "a", 16, *range(90, 96))):
            with pytest.raises(CppError) as doubt:
                worker.call(*operation)
            assert (doubt.value.kind, doubt.value.reason) == ("StateRefused", "SEQUENCE_IN_DOUBT")
    finally:
        os.kill(service.child_pid, signal.SIGCONT)
    until(lambda: worker.stats()["sequences"] == 1)
    assert worker.commit("a", 20, *range(10, 20)) == 16
    assert worker.show("a")["token_count"] == 20
    assert worker.lookup(*range(20)) == 16


@pytest.mark.parametrize("hook", ["before", "after"])
@pytest.mark.parametrize("method", ["Commit", "Handoff"])
def test_a_commit_under_way_is_told_as_taken(tmp_path: Path, method: str, hook: str) -> None:
    """[L12] It may have taken effect, and the next process takes up nothing less; it is sent again, with one effect."""
    computed, count = (33, 34) if method == "Commit" else (20, 20)
    with contextlib.closing(FakeService(tmp_path, LAYOUT, 16)) as service:
        with CppWorker.connected(service.path, timeout_s=DEADLINE_S) as worker:
            worker.open("p", LAYOUT.model, 1, pool_size(16))
            worker.allocate("a", 16, 0, *range(20))
            once(getattr(service, hook), method, service.restart)
            if method == "Commit":
                assert worker.commit("a", computed, *range(20, count)) == 32
                shown = worker.show("a")
                assert (shown["computed_tokens"], shown["token_count"]) == (computed, count)
            else:
                assert worker.handoff("a", computed)
        (held,) = service.wait_until_resumed().sequences
        assert (held.sequence.computed_tokens, held.sequence.token_count) == (computed, count)
        assert held.tail_token_ids == array("I", range(count)).tobytes()
        assert len(service.calls[method]) == 2


def test_what_was_released_while_the_service_was_away_is_not_told(tmp_path: Path) -> None:
    """Though an object of it is still there; by that the next process releases it."""
    with (
        contextlib.closing(FakeService(tmp_path, LAYOUT, 16)) as service,
        CppWorker.connected(service.path, timeout_s=DEADLINE_S) as worker,
    ):
        worker.open("p", LAYOUT.model, 1, pool_size(16))
        for name in ("gone", "same"):
            worker.allocate_as(name, "r", *range(16))
        kept = worker.allocate("kept", 0, 0, *range(16))
        worker.commit("gone", 16)
        service.kill()
        worker.release("gone")
        service.begin()
        assert worker.extend("kept", 16)["capacity_tokens"] == 32
        assert [held.sequence.sequence_id for held in service.wait_until_resumed().sequences] == [kept["id"]]


def test_a_repeated_allocate_gives_the_same_sequence(tmp_path: Path) -> None:
    """C4: it has one state, and one end; a repetition that runs out of time does not end it."""
    answered = threading.Event()
    with contextlib.closing(FakeService(tmp_path, LAYOUT, 16)) as service:
        with CppWorker.connected(service.path, timeout_s=1.0) as worker:
            worker.open("p", LAYOUT.model, 1, pool_size(16))
            first, again = (worker.allocate_as(name, "r", *range(20)) for name in ("a", "b"))
            assert again == first
            assert worker.commit("a", 20) == 16
            assert worker.show("b")["computed_tokens"] == 20
            once(service.before, "Allocate", wait_for(answered))
            with pytest.raises(CppError) as late:
                worker.allocate_as("c", "r", *range(20))
            assert late.value.reason == "DEADLINE_EXCEEDED"
            answered.set()
            assert worker.extend("b", 16)["capacity_tokens"] == 48
            worker.release("b")
            with pytest.raises(CppError) as over:
                worker.commit("a", 20)
            assert over.value.reason == "SEQUENCE_ENDED"
            assert "Release" in service.calls
        assert len(service.calls["Release"]) == 1


def test_who_cannot_be_reached_is_named(tmp_path: Path) -> None:
    """At once, with the address; an odd one is the caller's mistake."""
    with CppWorker() as worker:
        with pytest.raises(CppError) as nobody:
            worker.connect(tmp_path / "no.sock", 5000)
        assert (nobody.value.kind, nobody.value.reason) == ("Unavailable", "SERVICE_UNREACHABLE")
        assert nobody.value.metadata["address"] == str(tmp_path / "no.side")
        for path in ("relative.sock", f"/{'x' * 120}"):
            with pytest.raises(CppError) as odd:
                worker.connect(path, 5000)
            assert (odd.value.kind, odd.value.metadata["field"]) == ("CallerMistake", "socket_path")
