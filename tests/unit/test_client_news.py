"""What only another process may be sent again [C8]: whether there is one, the client is told by others."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from fake_service import FakeService
from integration.client_kinds import Connect
from integration.client_worker import LAYOUT
from kvharbor.client import ServiceUnreachable, channel
from kvharbor.client.calls import PoolCalls, Repeat
from moments import hurried, once, wait
from waiting import until

SENT_ONCE = Repeat.NEVER
SENT_TO_ANOTHER = Repeat.TO_ANOTHER
"""As a warm-up that gives a sequence."""


@pytest.fixture(autouse=True)
def repeat(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Repeat:
    """When Stats may be sent again."""
    repeat: Repeat = getattr(request, "param", SENT_TO_ANOTHER)
    stats = PoolCalls.stats
    monkeypatch.setattr(PoolCalls, "stats", lambda calls: replace(stats(calls), repeat=repeat))
    return repeat


def test_the_news_of_an_end_may_be_late(
    open_harbor: Connect, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C8: the process does not tell of it, others do, when they have their turn."""
    monkeypatch.setattr(channel, "MAX_NEWS_S", 0.0)
    pool = open_harbor(service.target).open_pool("p", LAYOUT)
    broken_off = threading.Event()

    def end() -> None:
        service.break_off()
        broken_off.set()

    def tell() -> None:
        wait(broken_off)
        until(lambda: bool(pool.link._changed._waiters))
        service.restart()

    once(service.before, "Stats", end)
    with ThreadPoolExecutor(1) as thread:
        telling = thread.submit(tell)
        assert pool.stats().sequence_count == 0
        telling.result()
    assert len(service.calls["Stats"]) == 2


@pytest.mark.slow
def test_what_breaks_off_without_an_end_is_not_sent_again(open_harbor: Connect, service: FakeService) -> None:
    """C8: the same process may have taken it."""
    pool = open_harbor(service.target).open_pool("p", LAYOUT)

    def cut_off() -> None:
        service.break_off()
        service.begin()

    once(service.before, "Stats", cut_off)
    with hurried(pool), pytest.raises(ServiceUnreachable) as cut:
        pool.stats()
    assert cut.value.outcome_unknown
    assert len(service.calls["Stats"]) == 1


@pytest.mark.slow
def test_a_call_that_waits_for_no_service_waits_for_no_news(open_harbor: Connect, service: FakeService) -> None:
    """`away_wait_s`: it would wait for them as for the next process."""
    pool = open_harbor(service.target, away_wait_s=0.0).open_pool("p", LAYOUT)

    def cut_off() -> None:
        service.break_off()
        service.begin()

    once(service.before, "Stats", cut_off)
    began_at = time.monotonic()
    with pytest.raises(ServiceUnreachable):
        pool.stats()
    assert time.monotonic() - began_at < pool.link.options.timeout_s / 2


@pytest.mark.parametrize("repeat", [SENT_ONCE, SENT_TO_ANOTHER], indirect=True)
def test_an_answer_of_a_process_that_has_ended_is_that_of_what_is_never_repeated(
    open_harbor: Connect, service: FakeService, repeat: Repeat
) -> None:
    """C8: an `unwarm` that has taken effect is not sent to the next process, which would not find the pin."""
    pool = open_harbor(service.target).open_pool("p", LAYOUT)

    def end() -> None:
        service.blink()
        service.wait_until_resumed()

    once(service.after, "Stats", end)
    assert pool.stats().sequence_count == 0
    assert len(service.calls["Stats"]) == (1 if repeat is SENT_ONCE else 2)
