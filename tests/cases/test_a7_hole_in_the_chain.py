"""A7: a later block without its start is worth nothing, so a chain never has a hole."""

import pytest
from calls import allocate, cache, classes, new_pool, present, span

from kvharbor.pool.errors import BlockHeld
from kvharbor.pool.steps import finish


def test_without_its_start_nothing_is_found() -> None:
    """A7: evicting the first block drops what hangs below it; recommitted, it is found alone."""
    pool = new_pool(3)
    view = cache(pool, span(1, 12))
    assert finish(pool.evict_block(view.block_ids[0], view.generations[0])) == 3
    assert (present(pool, span(1, 12)), present(pool, span(5, 12))) == (0, 0)
    assert classes(pool.stats()) == {"free": 3}
    cache(pool, span(1, 4))
    assert present(pool, span(1, 12)) == 4


def test_a_middle_block_takes_only_what_is_behind_it() -> None:
    """A7: the head stays a hit."""
    pool = new_pool(3)
    view = cache(pool, span(1, 12))
    assert finish(pool.evict_block(view.block_ids[1], view.generations[1])) == 2
    assert present(pool, span(1, 12)) == 4


def test_a_chain_that_somebody_reads_is_not_cut() -> None:
    """A7: while a block below is held the eviction is refused, with how many, and changes nothing."""
    pool = new_pool(5)
    view = cache(pool, span(1, 12))
    allocate(pool, span(1, 9), session=2)
    with pytest.raises(BlockHeld) as refused:
        finish(pool.evict_block(view.block_ids[0], view.generations[0]))
    assert refused.value.attributes == {"block_id": view.block_ids[0], "held_block_count": 2}
    assert present(pool, span(1, 12)) == 12
