"""What only another process may be sent again [C8]: whether there is one, the client is told by others."""

import threading
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


@pytest.fixture(autouse=True)
def _sent_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stats may be sent again to another process only, as a warm-up may."""
    stats = PoolCalls.stats
    monkeypatch.setattr(PoolCalls, "stats", lambda calls: replace(stats(calls), repeat=Repeat.TO_ANOTHER))


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
    with hurried(pool, 0.5), pytest.raises(ServiceUnreachable) as cut:
        pool.stats()
    assert cut.value.outcome_unknown
    assert len(service.calls["Stats"]) == 1
