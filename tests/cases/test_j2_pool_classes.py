"""J2: what is used, cached, warm and free are separate numbers that sum to the total in every snapshot."""

import time

import pytest
from calls import allocate, cache, classes, commit, new_pool, prompt, span

from kvharbor.pool import Pool
from kvharbor.pool.steps import finish


def test_a_mixed_pool_is_told_apart() -> None:
    """J2: 3 active (one of them holding a single token), 4 cached, 2 warm, 1 free of 10; 5 reclaimable."""
    pool = new_pool(10)
    cache(pool, span(1, 8))
    finish(pool.warmup("t", None, prompt(span(1, 8)), "w"))
    cache(pool, span(101, 116))
    view = allocate(pool, span(51, 59))
    commit(pool, view, 9)
    assert classes(pool.stats()) == {"free": 1, "reserved": 1, "active": 2, "cached": 4, "warm": 2}
    assert pool.available_block_count == 5


def test_every_snapshot_sums_while_calls_are_under_way() -> None:
    """J2: between any two slices of a long call the classes sum to the total, none below zero."""
    pool = new_pool(10, slice_blocks=1)
    cache(pool, span(1, 32))
    for tokens in (span(1, 33), span(101, 140), span(1, 20)):
        snapshots = 0
        for _ in pool.allocate(1, prompt(tokens)):
            snapshots += min(classes(pool.stats()).values()) > 0
        assert snapshots >= 4
        finish(pool.release(1, pool._state.sessions[1].next_number - 1))


@pytest.mark.slow
def test_five_thousand_tenants_are_counted_quickly() -> None:
    """J2: a snapshot of 5,000 tenants takes less than 250 ms, and each tenant is in it once."""
    pool = Pool(new_pool(5_000).config)
    for number in range(1, 5_001):
        pool.open_session(number, f"tenant-{number}")
        allocate(pool, [number], session=number)
    taken = []
    for _ in range(3):
        began = time.perf_counter()
        stats = pool.stats()
        taken.append(time.perf_counter() - began)
    # The quickest: what else the machine does meanwhile is not the pool's cost.
    assert min(taken) < 0.25
    assert len({one.tenant for one in stats.tenants}) == 5_000
    assert stats.sequence_count == 5_000
