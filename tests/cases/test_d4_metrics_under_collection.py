"""D4: calls, scrapes and watches go on beside each other while the garbage collector runs all the time."""

import itertools
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import start_hooks
from conftest import StartService
from kvharbor.v1 import cache_service_pb2 as cache
from raw_caller import RawCaller
from scraping import scrape

SOAK_S = float(os.environ.get("SOAK_S", "3"))
"""Seconds of load: SOAK_S=60 for the case's long form."""
MOST_P99_S = 1.0
MOST_PAUSE_S = 5.0
"""For one thread. A lock taken in the wrong order would hold it for ever; a busy machine does not hold it so long."""
POOL_BLOCKS = 64


class Load:
    """Threads that repeat one thing each, and how long every turn took."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self.turns: dict[str, list[float]] = {}
        self.failures: list[BaseException] = []

    def start(self, name: str, turn: Callable[[int], None]) -> None:
        """Repeats `turn`, with a number that rises."""
        durations = self.turns[name] = []

        def run() -> None:
            for number in itertools.count():
                if self._stop.is_set():
                    return
                began_at = time.monotonic()
                try:
                    turn(number)
                except BaseException as failure:
                    self.failures.append(failure)
                    return
                durations.append(time.monotonic() - began_at)

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()

    def run(self, seconds: float) -> None:
        """Lets them go on for so long, or until one fails."""
        give_up_at = time.monotonic() + seconds
        while time.monotonic() < give_up_at and not self.failures:
            self._stop.wait(0.05)
        self._stop.set()
        for thread in self._threads:
            thread.join()


def worker(caller: RawCaller, pool_id: str, first_token: int) -> Callable[[int], None]:
    """Returns a turn that allocates, commits and releases a prompt, shared with other workers in part."""

    def turn(number: int) -> None:
        sequence = caller.allocate(
            pool_id, *range(16), *range(first_token + 32 * number, first_token + 32 * number + 32)
        )
        caller.commit(pool_id, sequence.sequence_id, 48)
        item = cache.ReleaseItem(sequence_id=sequence.sequence_id)
        caller.call(caller.cache.Release, cache.ReleaseRequest(pool_id=pool_id, items=[item]))

    return turn


def watcher(caller: RawCaller, pool_id: str) -> Callable[[int], None]:
    """Returns a turn that opens a watch, reads its beginning and cancels it."""

    def turn(_: int) -> None:
        watch = caller.cache.Watch(cache.WatchRequest(pool_id=pool_id), metadata=caller.metadata, timeout=10)
        next(watch)
        watch.cancel()

    return turn


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(120 + SOAK_S)
def test_nothing_stands_still(start_fresh: StartService, tmp_path: Path) -> None:
    """D4: no thread stands still, the 99th percentile of calls and scrapes is below 1 s, and SIGTERM ends it in order.

    The collector runs every ten allocations of an object, in the service's process.
    """
    hook = start_hooks.environment(tmp_path / "hook", "import gc\ngc.set_threshold(10)\n")
    service = start_fresh(metrics_listen="127.0.0.1:0", environment=hook)
    address = service.wait_for("ready")["metrics_listen"]
    callers = [RawCaller(str(service.socket)) for _ in range(5)]
    load = Load()
    try:
        (pool_id,) = {caller.open_pool("p", block_count=POOL_BLOCKS) for caller in callers}
        for index, caller in enumerate(callers[:4]):
            load.start(f"worker {index}", worker(caller, pool_id, 10**6 * (index + 1)))
            load.start(f"scraper {index}", lambda _: _check(address))
        load.start("watcher", watcher(callers[4], pool_id))
        load.run(SOAK_S)
    finally:
        for caller in callers:
            caller.close()
    assert load.failures == []
    for turns in load.turns.values():
        assert max(turns, default=math.inf) < MOST_PAUSE_S
    for kind in ("worker", "scraper", "watcher"):
        assert (
            _p99_s([taken for name, turns in load.turns.items() if name.startswith(kind) for taken in turns])
            < MOST_P99_S
        )
    assert service.stop() == 0


def _p99_s(durations: list[float]) -> float:
    return sorted(durations)[len(durations) * 99 // 100]


def _check(address: str) -> None:
    (size,) = scrape(address).values("kvharbor_pool_size_blocks").values()
    assert size == POOL_BLOCKS
