"""Acquire and Lease: what a session takes to hold by itself."""

import pytest
from block_calls import acquire, backwards, commit, keys, lease, part, publish, release, tokens
from calls import allocate, cache, classes, new_pool, span
from calls import release as release_sequence

from kvharbor.pool import Chain, ExtraKey, Holding
from kvharbor.pool.errors import (
    BlockNotHeld,
    InvalidField,
    PoolExhausted,
    RequestTooLarge,
)
from kvharbor.pool.steps import finish


def test_what_one_session_commits_another_acquires() -> None:
    """The longest committed run is held, and the rest of the table leased, in one call."""
    pool = new_pool(16)
    blocks = publish(pool, keys("abcd"), 4)
    found = acquire(pool, keys("abcx"), 6, session=2)
    assert found.held == part(blocks, 0, 3)
    assert (len(found.leased), found.pending) == (3, None)
    assert classes(pool.stats()) == {"free": 9, "reserved": 3, "active": 4}
    assert pool.stats().shared_block_count == 3
    assert (pool.holding(1), pool.holding(2)) == (Holding(0, 0, 4, 0), Holding(0, 3, 3, 3))
    pool.check_invariants()


def test_an_acquire_is_a_request_with_the_tokens_of_its_chain() -> None:
    """Granted ones count in the statistics, refused ones as refusals; one that only asks is no request."""
    pool = new_pool(8)
    publish(pool, tokens(span(1, 8)), 2)
    acquire(pool, tokens(span(1, 12)), session=2)
    assert pool.stats().counters.allocate_count == 0
    acquire(pool, tokens(span(1, 12)), 3, session=2)
    with pytest.raises(PoolExhausted):
        acquire(pool, tokens(span(21, 24)), 7, session=2)
    counters = pool.stats().counters
    assert (counters.allocate_count, counters.hit_count, counters.refused_count) == (1, 1, 1)
    assert (counters.prompt_token_count, counters.reused_token_count) == (12, 8)


def test_another_tenant_or_scheme_finds_nothing() -> None:
    """[G8] Neither by the same keys nor by the same tokens."""
    pool = new_pool(16)
    publish(pool, keys("ab"), 2)
    assert len(acquire(pool, keys("ab"), session=3).held) == 0
    other = Chain(keys=keys("ab").keys, scheme="another")
    assert len(acquire(pool, other, session=2).held) == 0


def test_sequences_and_block_calls_share_an_exact_namespace() -> None:
    """[G1] One index: what either publishes the other finds."""
    pool = new_pool(16)
    blocks = publish(pool, tokens(span(1, 8)), 2)
    view = allocate(pool, span(1, 9), session=2)
    assert view.block_ids[:2] == blocks.block_ids
    release_sequence(pool, view)
    cache(pool, span(1, 12), session=2)
    assert len(acquire(pool, tokens(span(1, 12))).held) == 3
    pool.check_invariants()


def test_extra_keys_tell_equal_tokens_apart() -> None:
    """[G1] They count from the start of the chain, in a commit from the start of its own contents."""
    pool = new_pool(16)
    whole = [ExtraKey(5, b"image")]
    first = publish(pool, tokens(span(1, 4)), 1)
    rest = lease(pool, 2)
    commit(pool, rest, tokens(span(5, 12), [ExtraKey(1, b"image")]), first)
    assert len(acquire(pool, tokens(span(1, 12)), session=2).held) == 1
    assert len(acquire(pool, tokens(span(1, 12), whole), session=2).held) == 3


def test_extra_keys_keep_their_place_behind_a_repetition() -> None:
    """[G1] [B3]"""
    pool = new_pool(16, slice_blocks=1)
    extras = [ExtraKey(1, b"a"), ExtraKey(5, b"b"), ExtraKey(8, b"c")]
    own = lease(pool, 3)
    commit(pool, part(own, 0, 1), tokens(span(1, 4), extras[:1]))
    commit(pool, own, tokens(span(1, 12), extras))
    assert acquire(pool, tokens(span(1, 12), extras), session=2).held == own
    commit(pool, own, tokens(span(1, 12), extras))
    with pytest.raises(BlockNotHeld):
        commit(pool, own, tokens(span(1, 12), extras[1:]))


def test_a_run_below_the_threshold_is_not_held() -> None:
    """The whole table is leased then."""
    pool = new_pool(8, min_reuse_tokens=12)
    publish(pool, keys("ab"), 2)
    found = acquire(pool, keys("ab"), 2, session=2)
    assert (len(found.held), len(found.leased)) == (0, 2)


def test_an_acquire_that_does_not_fit_holds_nothing() -> None:
    """All or nothing: neither the match nor a part of the rest stays, in whatever slice it is refused."""
    pool = new_pool(8, slice_blocks=2)
    blocks = publish(pool, keys("abcd"), 4, session=2)
    release(pool, backwards(blocks), session=2)
    lease(pool, 3, session=2)
    with pytest.raises(PoolExhausted) as refused:
        acquire(pool, keys("abcde"), 6)
    assert refused.value.attributes["needed_block_count"] == 2
    assert pool.holding(1) == Holding(0, 0)
    assert classes(pool.stats()) == {"free": 1, "reserved": 3, "cached": 4}
    with pytest.raises(RequestTooLarge):
        acquire(pool, keys("ab"), 9)
    pool.check_invariants()


def test_a_lease_is_all_or_nothing_below_its_least() -> None:
    """It takes what there is up to what is wanted, the cached too."""
    pool = new_pool(8)
    release(pool, publish(pool, keys("ab"), 2))
    assert len(finish(pool.lease(1, 0, 5))) == 5
    with pytest.raises(PoolExhausted):
        finish(pool.lease(2, 4, 5))
    assert pool.holding(2) == Holding(0, 0)
    assert len(finish(pool.lease(2, 3, 5))) == 3
    assert len(finish(pool.lease(2, 0, 5))) == 0
    assert classes(pool.stats()) == {"reserved": 8}
    for least, want in ((-1, 1), (2, 1), (0, 0)):
        with pytest.raises(InvalidField):
            finish(pool.lease(1, least, want))
    with pytest.raises(RequestTooLarge):
        finish(pool.lease(1, 9, 9))
