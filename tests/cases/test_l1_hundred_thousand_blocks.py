"""L1: eviction, refusal and bookkeeping cost what they touch, however large the pool is. Loose limits and ratios."""

import resource
import time
from collections.abc import Callable
from itertools import pairwise

import pytest
from calls import allocate, cache, encode, new_pool, prompt, publish, release, span

from kvharbor.pool import POLICIES, Pool, Prompt
from kvharbor.pool.errors import PoolExhausted
from kvharbor.pool.steps import finish

pytestmark = [pytest.mark.slow, pytest.mark.alone]


def seconds(work: Callable[[], object]) -> float:
    """Of this thread's own: it never waits."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


def full_of_cache(block_count: int, policy: str) -> Pool:
    pool = new_pool(block_count, 16, policy=policy)
    for first in range(0, block_count, 500):
        cache(pool, span(first * 16, (first + 500) * 16 - 1))
    pool.drain_events()
    assert pool.stats().cached_block_count == block_count
    return pool


@pytest.mark.parametrize("policy", POLICIES)
def test_eviction_costs_what_it_evicts(policy: str) -> None:
    """L1 (a): 1,000 fresh blocks of a full cache take at most 50 ms, and no more a block than in a small pool."""
    fresh = encode(range(1 << 30, (1 << 30) + 16_000))
    large, small = full_of_cache(100_000, policy), full_of_cache(1_000, policy)

    def evict_all(pool: Pool) -> float:
        finish(pool.release(1, finish(pool.allocate(1, Prompt(fresh))).number))
        took = []
        for first in range(3):
            cache(pool, span(first * 16_000, (first + 1) * 16_000 - 1))
            started = seconds(lambda: finish(pool.allocate(1, Prompt(fresh), request_id="r")))
            finish(pool.release_request(1, "r"))
            took.append(started)
        return min(took)

    in_large = evict_all(large)
    assert in_large <= 0.05
    assert in_large <= 2 * evict_all(small) + 0.002


def test_a_refusal_scans_nothing() -> None:
    """L1 (b): with every block active a failing Allocate takes at most 1 ms."""
    pool = new_pool(100_000, 16)
    allocate(pool, range(1_600_000))
    asked = prompt(span(1, 16))

    def refuse_a_thousand() -> None:
        for _ in range(1_000):
            with pytest.raises(PoolExhausted):
                finish(pool.allocate(2, asked))

    assert seconds(refuse_a_thousand) <= 1.0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_long_release_lets_others_in(policy: str) -> None:
    """L1 (c): 65,536 blocks come back within 200 ms, and no slice of it keeps others waiting for 50 ms."""
    pool = new_pool(100_000, 16, policy=policy)
    view = publish(pool, span(0, 65_536 * 16 - 1))
    moments = [time.thread_time()]
    moments.extend(time.thread_time() for _ in pool.release(1, view.number))
    moments.append(time.thread_time())
    assert moments[-1] - moments[0] <= 0.2
    assert max(after - before for before, after in pairwise(moments)) <= 0.05
    assert pool.stats().cached_block_count == 65_536


def test_use_leaves_nothing_behind() -> None:
    """L1 (d): 200,000 cycles of one hot block do not grow the process."""
    pool = new_pool(1_000, 16, policy="auto", history=True)
    cache(pool, span(1, 16))
    asked = prompt(span(1, 17))

    def cycle(count: int) -> None:
        for _ in range(count):
            release(pool, finish(pool.allocate(1, asked)))
            pool.drain_events()

    cycle(1_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cycle(200_000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 5_000
