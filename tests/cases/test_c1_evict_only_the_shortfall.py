"""C1: only what is short is evicted, from the tail, and always the same."""

import pytest
from calls import allocate, cache, new_pool, present, release, span

from kvharbor.pool import POLICIES

P, Q = span(1, 12), span(51, 62)


def run_once(policy: str) -> list[tuple[int, int, int]]:
    """P's hit, Q's hit and evictions so far, after each step."""
    pool = new_pool(6, policy=policy)
    cache(pool, P)
    cache(pool, Q)
    seen = []
    for fresh in (101, 111, 121):
        if fresh == 121:
            used = allocate(pool, span(1, 4), most=4)
            release(pool, used)
        allocate(pool, span(fresh, fresh + 3))
        seen.append((present(pool, P), present(pool, Q), pool.stats().counters.evicted_block_count))
        pool.check_invariants()
    return seen


@pytest.mark.parametrize("policy", POLICIES)
def test_the_deepest_of_the_oldest_goes_one_by_one(policy: str) -> None:
    """C1: three fresh blocks cost P's tail, P's middle, then Q's tail, as P's head was just used; fifty times alike."""
    assert [run_once(policy) for _ in range(50)] == [[(8, 12, 1), (4, 12, 2), (4, 8, 3)]] * 50
