"""LeastRecentlyReleased, alone and as the pool uses it."""

from calls import allocate, cache, classes, new_pool, present, publish, release, span

from kvharbor.pool.eviction import LeastRecentlyReleased
from kvharbor.pool.steps import finish


def test_the_one_released_first_goes_first() -> None:
    """Order of release is order of eviction; a block held again leaves the order."""
    policy = LeastRecentlyReleased()
    policy.insert_many((4, 2, 9))
    policy.remove_many((2,))
    assert (list(policy), len(policy), 2 in policy, 9 in policy) == ([4, 9], 2, False, True)
    policy.insert_many((2,))
    assert (policy.pop_many(2), policy.pop_many(1), list(policy)) == ([4, 9], [2], [])


def test_the_tail_goes_before_the_head() -> None:
    """[P2] A chain dies from its tail: each eviction leaves a shorter prefix, never a hole."""
    pool = new_pool(4)
    cache(pool, span(1, 16))
    for left in (12, 8, 4, 0):
        allocate(pool, [99, left], session=2)
        assert present(pool, span(1, 16)) == left
        pool.check_invariants()


def test_only_the_shortfall_is_evicted() -> None:
    """[P5] Free blocks go first; what is cached goes only as far as they do not suffice."""
    pool = new_pool(6)
    cache(pool, span(1, 16))
    allocate(pool, span(50, 61))
    assert pool.stats().counters.evicted_block_count == 1
    assert present(pool, span(1, 16)) == 12


def test_its_own_prefix_is_never_evicted_for_a_request() -> None:
    """Matched blocks are held before anything is evicted, and never count as room for the rest."""
    pool = new_pool(6)
    cache(pool, span(1, 8))
    cache(pool, span(51, 66))
    view = allocate(pool, [*span(1, 8), *span(201, 212)])
    assert (view.cached_tokens, present(pool, span(1, 8)), present(pool, span(51, 66))) == (8, 8, 4)
    pool.check_invariants()


def test_a_parent_outlives_its_children_across_holders() -> None:
    """Two sequences share a head; whichever ends first, the shared head goes last."""
    pool = new_pool(4)
    first = publish(pool, [*span(1, 4), *span(11, 14)])
    second = publish(pool, [*span(1, 4), *span(21, 24)])
    release(pool, first)
    release(pool, second)
    assert classes(pool.stats()) == {"free": 1, "cached": 3}
    allocate(pool, [77] * 8)
    assert present(pool, [*span(1, 4), *span(11, 14)]) == 4
    allocate(pool, [78] * 4, session=2)
    assert present(pool, [*span(1, 4), *span(21, 24)]) == 4


def test_a_lookup_does_not_count_as_a_use() -> None:
    """Lookup changes no recency: the prompt looked up a hundred times still goes first."""
    pool = new_pool(2)
    cache(pool, span(1, 4))
    cache(pool, span(11, 14))
    for _ in range(100):
        present(pool, span(1, 4))
    allocate(pool, [99])
    assert (present(pool, span(1, 4)), present(pool, span(11, 14))) == (0, 4)


def test_evict_unheld_leaves_what_is_held() -> None:
    """Everything cached goes; a held chain stays whole."""
    pool = new_pool(6, slice_blocks=1)
    cache(pool, span(11, 22))
    publish(pool, span(1, 8))
    assert finish(pool.evict_unheld()) == 3
    assert classes(pool.stats()) == {"free": 4, "active": 2}
    assert finish(pool.evict_unheld()) == 0
