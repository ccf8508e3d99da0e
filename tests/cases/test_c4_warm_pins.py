"""C4: a pin is a reference on distinct blocks, a budget guards the others, and nothing outlives its end."""

import pytest
from calls import allocate, classes, commit, new_pool, present, prompt, release, span

from kvharbor.pool import Pool
from kvharbor.pool.errors import PoolExhausted, WarmBudgetExceeded
from kvharbor.pool.steps import finish

W1, W2, W3 = span(1, 12), [*span(1, 8), *span(61, 68)], [*span(1, 8), *span(61, 64)]


def fill(pool: Pool, tokens: list[int], name: str, expires_at: float | None = None) -> None:
    view = finish(pool.warmup("t", 1, prompt(tokens), name, expires_at=expires_at)).sequence
    if view is not None:
        commit(pool, view, len(tokens))
        release(pool, view)


def pinned() -> Pool:
    """Ten blocks, a budget of four; W1 and W3 pinned, then W1 ended."""
    pool = new_pool(10, warm_budget_ratio=0.4)
    fill(pool, W1, "w1")
    with pytest.raises(WarmBudgetExceeded):
        fill(pool, W2, "w2")
    fill(pool, W3, "w3")
    assert pool.stats().warm_budget_used_block_count == 4
    finish(pool.unwarm("t", "w1"))
    assert classes(pool.stats()) == {"free": 6, "cached": 1, "warm": 3}
    return pool


@pytest.mark.parametrize(("fresh", "evicted"), [(6, 0), (7, 1)])
def test_room_beside_the_pins_is_everybodys(fresh: int, evicted: int) -> None:
    """C4: six fresh blocks are free, the seventh is what only W1 had pinned; W3 stays a hit."""
    pool = pinned()
    allocate(pool, span(101, 100 + 4 * fresh))
    assert (pool.stats().counters.evicted_block_count, present(pool, W3)) == (evicted, 12)


def test_pinned_blocks_are_not_room() -> None:
    """C4: eight fresh blocks do not fit beside three warm ones."""
    pool = pinned()
    with pytest.raises(PoolExhausted):
        allocate(pool, span(101, 132))
    assert present(pool, W3) == 12


def test_an_expired_pin_protects_nothing() -> None:
    """C4: past its time the whole pool can be had, without any traffic in between."""
    pool = new_pool(10, warm_budget_ratio=0.4)
    fill(pool, W1, "w1", expires_at=1.0)
    assert pool.next_deadline() == 1.0
    finish(pool.expire(3.0))
    assert (pool.stats().pin_count, present(pool, W1)) == (0, 12)
    assert len(allocate(pool, span(101, 140)).block_ids) == 10
