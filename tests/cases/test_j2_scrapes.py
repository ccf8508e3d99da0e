"""J2: what Prometheus sees of free, active, cached and warm blocks is of one moment in every scrape."""

import threading
import time
from collections.abc import Iterator

import grpc
import pytest

from conftest import StartService
from kvharbor.v1 import cache_service_pb2 as cache
from raw_caller import RawCaller, tokens
from scraping import Scrape, scrape
from service_process import ServiceProcess
from waiting import until

pytestmark = pytest.mark.slow
SCRAPE_COUNT = 50
SCRAPE_EVERY_S = 0.02


@pytest.fixture
def service(start_fresh: StartService) -> ServiceProcess:
    """A service with metrics."""
    return start_fresh(metrics_listen="127.0.0.1:0")


@pytest.fixture
def caller(service: ServiceProcess) -> Iterator[RawCaller]:
    """A session with it."""
    with RawCaller(str(service.socket)) as session:
        yield session


def publish(caller: RawCaller, pool_id: str, ids: range, *, keep: bool = False) -> None:
    """Commits a prompt; its sequence is released unless kept."""
    sequence = caller.allocate(pool_id, *ids)
    caller.commit(pool_id, sequence.sequence_id, len(ids))
    if not keep:
        item = cache.ReleaseItem(sequence_id=sequence.sequence_id)
        caller.call(caller.cache.Release, cache.ReleaseRequest(pool_id=pool_id, items=[item]))


def test_each_class_is_its_own_gauge(service: ServiceProcess, caller: RawCaller) -> None:
    """J2: of 10 blocks 3 are held (one with a single token), 4 cached, 2 warm, 1 free; 5 reclaimable; usage 0.5."""
    pool_id = caller.open_pool("p", block_count=10)
    publish(caller, pool_id, range(1000, 1032))
    warm = cache.WarmupRequest(pool_id=pool_id, token_ids=tokens(*range(1000, 1032)), name="w")
    caller.call(caller.cache.Warmup, warm)
    publish(caller, pool_id, range(2000, 2064))
    publish(caller, pool_id, range(3000, 3033), keep=True)
    seen = scrape(service.wait_for("ready")["metrics_listen"])
    labels = {"tenant": caller.welcome.tenant, "pool": "p"}
    assert seen.classes(**labels) == {"free": 1, "reserved": 1, "active": 2, "cached": 4, "warm": 2, "quarantined": 0}
    figures = ("size_blocks", "reclaimable_blocks", "scratch_blocks", "warm_budget_blocks", "warm_budget_used_blocks")
    assert [seen.value(f"kvharbor_pool_{figure}", **labels) for figure in figures] == [10, 5, 1, 2, 2]
    assert seen.value("kvharbor_pool_usage_ratio", **labels) == 0.5


def test_every_scrape_under_load_sums_to_the_size(service: ServiceProcess, caller: RawCaller) -> None:
    """J2: 50 scrapes a second while workers allocate, commit and release: none is negative, above the size, or torn."""
    caller.open_pool("p", block_count=10)
    labels = {"tenant": caller.welcome.tenant, "pool": "p"}
    address = service.wait_for("ready")["metrics_listen"]
    stop = threading.Event()

    def allocates(each: Scrape) -> float:
        return each.value("kvharbor_pool_allocates_total", **labels)

    def hammer(number: int) -> None:
        with RawCaller(str(service.socket)) as worker:
            pool_id = worker.open_pool("p", block_count=10)
            turn = 0
            while not stop.is_set():
                turn += 1
                first = number * 10**6 + 48 * turn
                # A pool of ten blocks is full now and then: that is part of the load.
                try:
                    publish(worker, pool_id, range(first, first + 40))
                except grpc.RpcError as failure:
                    if failure.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                        raise

    threads = [threading.Thread(target=hammer, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: allocates(scrape(address)))
        seen = list(_scrapes(address))
        seen.append(until(lambda: scrape(address), lambda last: allocates(last) > allocates(seen[0])))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    for each in seen:
        classes = each.classes(**labels)
        assert sum(classes.values()) == each.value("kvharbor_pool_size_blocks", **labels) == 10
        assert min(classes.values()) >= 0
        usage, reclaimable = (
            each.value(f"kvharbor_pool_{name}", **labels) for name in ("usage_ratio", "reclaimable_blocks")
        )
        assert usage == (10 - reclaimable) / 10
    counts = [allocates(each) for each in seen]
    assert counts == sorted(counts)


def _scrapes(address: str) -> Iterator[Scrape]:
    next_at = time.monotonic()
    for _ in range(SCRAPE_COUNT):
        yield scrape(address)
        next_at += SCRAPE_EVERY_S
        threading.Event().wait(max(next_at - time.monotonic(), 0))
