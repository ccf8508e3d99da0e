"""J2: free, active, cached and warm are counted apart, and each snapshot is of one moment."""

import itertools
import threading
from collections.abc import Iterator

import grpc
import pytest

from kvharbor.v1 import cache_service_pb2 as cache
from raw_caller import BLOCK_BYTES, RawCaller, tokens
from service_process import ServiceProcess
from waiting import until

CLASSES = ("free", "reserved", "active", "cached", "warm", "quarantined")


@pytest.fixture
def caller(service: ServiceProcess) -> Iterator[RawCaller]:
    """A session with a service of its own."""
    with RawCaller(str(service.socket)) as session:
        yield session


def publish(caller: RawCaller, pool_id: str, ids: range, *, keep: bool = False) -> None:
    """Commits a prompt; its sequence is released unless kept."""
    request = cache.AllocateRequest(pool_id=pool_id, token_ids=tokens(*ids))
    sequence = caller.call(caller.cache.Allocate, request).sequence
    item = cache.CommitItem(sequence_id=sequence.sequence_id, computed_tokens=len(ids))
    caller.call(caller.cache.Commit, cache.CommitRequest(pool_id=pool_id, items=[item]))
    if not keep:
        end = cache.ReleaseItem(sequence_id=sequence.sequence_id)
        caller.call(caller.cache.Release, cache.ReleaseRequest(pool_id=pool_id, items=[end]))


def snapshot(caller: RawCaller, pool_id: str) -> cache.PoolStats:
    """Returns one snapshot."""
    response: cache.StatsResponse = caller.call(caller.cache.Stats, cache.StatsRequest(pool_id=pool_id))
    return response.pools[0]


@pytest.mark.slow
def test_each_class_is_its_own_number(caller: RawCaller) -> None:
    """J2: of 10 blocks 3 active (one holds a single token), 4 cached, 2 warm, 1 free; reclaimable are 5."""
    pool_id = caller.open_pool("p", block_count=10)
    publish(caller, pool_id, range(1000, 1032))
    warm = cache.WarmupRequest(pool_id=pool_id, token_ids=tokens(*range(1000, 1032)), name="w")
    caller.call(caller.cache.Warmup, warm)
    publish(caller, pool_id, range(2000, 2064))
    publish(caller, pool_id, range(3000, 3033), keep=True)
    stats = snapshot(caller, pool_id)
    counts = {name: getattr(stats, f"{name}_block_count") for name in CLASSES}
    assert counts == {"free": 1, "reserved": 1, "active": 2, "cached": 4, "warm": 2, "quarantined": 0}
    assert (stats.total_block_count, stats.scratch_block_count) == (10, 1)
    assert (stats.used_bytes, stats.total_bytes) == (9 * BLOCK_BYTES, 10 * BLOCK_BYTES)
    assert (stats.warm_budget_used_block_count, stats.warm_budget_block_count) == (2, 2)


@pytest.mark.slow
def test_every_snapshot_under_load_sums_to_the_total(service: ServiceProcess, caller: RawCaller) -> None:
    """J2: 50 snapshots while others allocate, commit and release: none is negative, above the total, or torn."""
    pool_id = caller.open_pool("p", block_count=10)
    stop = threading.Event()

    def hammer(worker: RawCaller, base: int) -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            # A pool of ten blocks is full now and then: that is part of the load.
            try:
                publish(worker, pool_id, range(base + 48 * turn, base + 48 * turn + 40))
            except grpc.RpcError as failure:
                if failure.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise

    workers = [RawCaller(str(service.socket)) for _ in range(3)]
    for worker in workers:
        worker.open_pool("p", block_count=10)
    threads = [threading.Thread(target=hammer, args=(worker, number * 10**6)) for number, worker in enumerate(workers)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: snapshot(caller, pool_id).counters.allocate_count)
        seen = [snapshot(caller, pool_id) for _ in range(50)]
        seen.append(until(lambda: snapshot(caller, pool_id), lambda last: last.revision > seen[0].revision))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        for worker in workers:
            worker.close()
    for stats in seen:
        counts = [getattr(stats, f"{name}_block_count") for name in CLASSES]
        assert sum(counts) == stats.total_block_count == 10
        assert min(counts) >= 0
    assert [later.revision >= earlier.revision for earlier, later in itertools.pairwise(seen)] == [True] * 50
