"""C3: what can never fit and what does not fit now are told apart, with the numbers, by the pool itself."""

import pytest
from calls import allocate, cache, new_pool, prompt, release, span

from kvharbor.pool import POLICIES
from kvharbor.pool.errors import PoolExhausted, RequestTooLarge
from kvharbor.pool.steps import finish


@pytest.mark.parametrize("policy", POLICIES)
def test_the_usable_number_is_the_admitted_number(policy: str) -> None:
    """C3: U blocks fit, U + 1 never do, though the pool is empty; one block is served right after."""
    pool = new_pool(12, scratch_blocks=1, policy=policy)
    usable = pool.stats().total_block_count
    release(pool, allocate(pool, span(1, 4 * usable)))
    with pytest.raises(RequestTooLarge, match="larger than the pool") as refused:
        allocate(pool, span(1, 4 * usable + 1))
    assert refused.value.attributes == {"needed_block_count": usable + 1, "usable_block_count": usable}
    assert len(allocate(pool, [1], session=2).block_ids) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_a_full_pool_says_how_much_is_pinned(policy: str) -> None:
    """C3: with three blocks warm, U - 2 does not fit now, and the refusal counts the warm ones."""
    pool = new_pool(12, policy=policy)
    cache(pool, span(1, 12))
    finish(pool.warmup("t", None, prompt(span(1, 12)), "w"))
    with pytest.raises(PoolExhausted) as refused:
        allocate(pool, span(101, 140))
    told = refused.value.attributes
    assert (told["needed_block_count"], told["available_block_count"], told["warm_block_count"]) == (10, 9, 3)
