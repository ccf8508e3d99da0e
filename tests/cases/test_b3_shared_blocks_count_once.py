"""B3: a block moves between classes and is never in two, through a whole life cycle."""

from itertools import permutations

import pytest
from calls import allocate, new_pool, present, publish, span

from kvharbor.pool import Pool
from kvharbor.pool.steps import finish

B_PROMPT = [*span(1, 8), *span(50, 57)]


def counts(pool: Pool) -> tuple[int, int, int]:
    stats = pool.stats()
    found = (
        stats.reserved_block_count + stats.active_block_count,
        stats.cached_block_count,
        stats.free_block_count,
    )
    assert sum(found) == stats.total_block_count == 12
    pool.check_invariants()
    return found


@pytest.mark.parametrize("order", list(permutations("ABC")), ids="".join)
def test_counts_through_a_life_cycle(order: tuple[str, ...]) -> None:
    """B3: shared blocks count once, a release frees only what nobody else holds, and all orders end alike."""
    pool = new_pool(12)
    live = {"A": publish(pool, span(1, 16)).number}
    assert counts(pool) == (4, 0, 8)
    live["B"] = publish(pool, B_PROMPT).number
    assert counts(pool) == (6, 0, 6)
    (child,) = pool.finish_fork(finish(pool.fork(1, live["B"], 1)))
    live["C"] = child.number
    assert counts(pool) == (6, 0, 6)
    for name in order:
        finish(pool.release(1, live.pop(name)))
        held = ({1, 2, 3, 4} if "A" in live else set()) | ({1, 2, 5, 6} if live.keys() - {"A"} else set())
        assert counts(pool) == (len(held), 6 - len(held), 6)
    allocate(pool, span(101, 132))
    assert counts(pool) == (8, 4, 0)
    if order == ("A", "B", "C"):
        # Released first, A's own tail went first.
        assert (present(pool, span(1, 16)), present(pool, B_PROMPT)) == (8, 16)
