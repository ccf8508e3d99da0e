"""Ten thousand namespaces in one pool: each has its own content, and none makes another's calls slower."""

from statistics import median
from time import perf_counter

import pytest
from calls import allocate, cache, present, release, span
from restarts import SESSIONS, Restarts

from kvharbor.pool import POLICIES, Pool

pytestmark = [pytest.mark.slow, pytest.mark.alone]

COUNT = 10_000
TOKENS = span(1, 8)


def salt(number: int) -> bytes:
    """What sets a namespace apart."""
    return number.to_bytes(4, "little")


def seconds(pool: Pool, number: int) -> float:
    """Returns how long it takes to make a namespace and to leave two blocks in it."""
    began = perf_counter()
    cache(pool, TOKENS, salt=salt(number))
    return perf_counter() - began


@pytest.mark.parametrize("policy", POLICIES)
def test_each_of_ten_thousand_finds_its_own_and_outlives_the_process(policy: str) -> None:
    """G1, G7, G9: the same tokens in each; the last is made as fast as the first; with its blocks each is forgotten."""
    process = Restarts(2 * COUNT, policy=policy, history=True)
    pool = process.pool
    taken = [seconds(pool, number) for number in range(COUNT)]
    assert median(taken[-1_000:]) <= 2 * median(taken[:1_000])
    assert len(pool._state.namespaces) == COUNT
    blocks: set[int] = set()
    for number in range(COUNT):
        view = allocate(pool, TOKENS, most=8, salt=salt(number))
        assert view.cached_tokens == 8
        blocks.update(view.block_ids)
        release(pool, view)
    assert len(blocks) == 2 * COUNT
    assert present(pool, TOKENS, salt=salt(COUNT)) == 0

    pool = process.restart(SESSIONS)
    process.finish_resume(*SESSIONS)
    assert pool.stats().unrecorded_count == 0
    assert all(present(pool, TOKENS, salt=salt(number)) == 8 for number in range(COUNT))
    for number in range(COUNT, COUNT + 100):
        cache(pool, TOKENS, salt=salt(number))
    assert len(pool._state.namespaces) == COUNT
    assert sum(present(pool, TOKENS, salt=salt(number)) == 8 for number in range(COUNT)) == COUNT - 100
    pool.check_invariants()
