"""How what a session holds by itself ends, or goes into a table. Rules [B1], [B2], [B4], [B5]."""

from array import array

import pytest
from block_calls import acquire, backwards, commit, invalidate, keys, lease, part, publish, release, tokens
from calls import allocate, classes, encode, new_pool, prompt, span
from calls import release as release_sequence

from kvharbor.pool import BlockRun, Commit, Holding
from kvharbor.pool.errors import (
    BlockHeld,
    BlockNotHeld,
    CursorOutOfRange,
)
from kvharbor.pool.steps import finish


def test_a_committed_block_stays_as_long_as_what_is_behind_it() -> None:
    """[B2] It goes with the last one that the session holds, and those named first are evicted first."""
    pool = new_pool(8)
    blocks = publish(pool, keys("abcd"), 4)
    assert release(pool, part(blocks, 0, 3)) == 3
    assert release(pool, part(blocks, 0, 3)) == 0
    assert classes(pool.stats()) == {"free": 4, "active": 4}
    assert pool.holding(1).held_block_count == 4
    pool.check_invariants()
    assert release(pool, part(blocks, 3)) == 1
    assert list(pool._state.blocks.evictable) == list(reversed(blocks.block_ids))
    assert pool.holding(1) == Holding(0, 0)
    pool.check_invariants()


def test_to_hold_twice_is_to_hold_once() -> None:
    """[B1] One release ends it, and repeated it is nothing."""
    pool = new_pool(8)
    blocks = publish(pool, keys("ab"), 2)
    assert acquire(pool, keys("ab")).held == blocks
    assert pool.stats().shared_block_count == 0
    assert release(pool, blocks) == 2
    assert release(pool, blocks) == 0
    assert classes(pool.stats()) == {"free": 6, "cached": 2}


def test_a_release_of_another_generation_or_session_is_nothing() -> None:
    """[P3]"""
    pool = new_pool(8)
    own = lease(pool, 2)
    assert release(pool, BlockRun(own.block_ids, array("Q", [2, 2]))) == 0
    assert release(pool, own, session=2) == 0
    assert release(pool, own) == 2
    again = lease(pool, 2)
    assert release(pool, own) == 0
    assert list(again.generations) == [2, 2]


def test_releases_are_evicted_in_the_order_named() -> None:
    pool = new_pool(8)
    first, second = publish(pool, keys("ab"), 2), publish(pool, keys("xy"), 2)
    order = [second.block_ids[1], first.block_ids[1], second.block_ids[0], first.block_ids[0]]
    release(pool, BlockRun(array("I", order), array("Q", [1] * 4)))
    assert list(pool._state.blocks.evictable) == order


def test_an_invalid_block_and_all_behind_it_leave_the_index() -> None:
    """[B4] What the session holds is leased again, in a new generation; what nobody holds is free."""
    pool = new_pool(16)
    blocks = publish(pool, keys("abcd"), 4)
    branch = lease(pool, 1)
    commit(pool, branch, keys("x", "ab"), part(blocks, 1, 2))
    release(pool, part(blocks, 3))
    shadow = lease(pool, 1)
    commit(pool, shadow, keys("c", "ab"), part(blocks, 1, 2))
    done = invalidate(pool, part(blocks, 1, 2))
    expected = {*blocks.block_ids[1:3], *branch.block_ids, *shadow.block_ids}
    assert set(done.leased.block_ids) == expected
    assert done.before.block_ids == done.leased.block_ids
    assert list(done.before.generations) == [1] * 4
    assert list(done.leased.generations) == [2] * 4
    assert len(acquire(pool, keys("abcd"), session=2).held) == 1
    assert classes(pool.stats()) == {"free": 11, "reserved": 4, "active": 1}
    assert pool.holding(1) == Holding(0, 4, 1, 4)
    pool.check_invariants()
    assert commit(pool, part(done.leased, 0, 1), keys("b", "a"), part(blocks, 0, 1)) == []
    assert len(acquire(pool, keys("abcd"), session=2).held) == 2
    pool.check_invariants()


def test_an_invalid_block_lets_go_of_what_was_only_held_for_it() -> None:
    """[B2]"""
    pool = new_pool(8)
    blocks = publish(pool, keys("abc"), 3)
    release(pool, part(blocks, 0, 2))
    done = invalidate(pool, part(blocks, 2))
    assert done.leased.block_ids == blocks.block_ids[2:]
    assert classes(pool.stats()) == {"free": 5, "reserved": 1, "cached": 2}
    pool.check_invariants()


def test_what_others_hold_is_not_invalidated() -> None:
    """[G2] Nothing changes then: not for a session, a sequence, a pin or a shadow of another."""
    pool = new_pool(16)
    blocks = publish(pool, tokens(span(1, 12)), 3)

    def refused() -> None:
        before = pool.stats()
        with pytest.raises(BlockHeld):
            invalidate(pool, part(blocks, 0, 1))
        assert pool.stats() == before
        pool.check_invariants()

    held = acquire(pool, tokens(span(1, 12)), session=2).held
    refused()
    release(pool, backwards(held), session=2)
    view = allocate(pool, span(1, 9))
    refused()
    release_sequence(pool, view)
    finish(pool.warmup("t", None, prompt(span(1, 12)), "pin"))
    refused()
    finish(pool.unwarm("t", "pin"))
    copy = lease(pool, 3, session=2)
    commit(pool, copy, tokens(span(1, 12)), session=2)
    refused()
    release(pool, copy, session=2)
    for block in (BlockRun(blocks.block_ids, array("Q", [2, 2, 2])), lease(pool, 1), copy):
        with pytest.raises(BlockNotHeld):
            invalidate(pool, block)
    assert len(invalidate(pool, part(blocks, 0, 1)).leased) == 3


def test_leased_blocks_are_appended_to_a_table_by_its_commit() -> None:
    """[B5] Before anything else, and once: a repeated commit appends nothing twice."""
    pool = new_pool(16)
    view = allocate(pool, span(1, 4))
    own = lease(pool, 2)
    asked = Commit(4, encode(span(5, 11)), known_token_count=4, appended=own)
    finish(pool.commit(1, view.number, asked))
    pool.check_invariants()
    assert finish(pool.commit(1, view.number, asked)).committed_tokens == 4
    assert pool.holding(1) == Holding(1, 2)
    again = Commit(11, appended=own)
    assert finish(pool.commit(1, view.number, again)).committed_tokens == 8
    finish(pool.commit(1, view.number, again))
    pool.check_invariants()
    assert release(pool, own) == 0
    release_sequence(pool, view)
    assert classes(pool.stats()) == {"free": 14, "cached": 2}


def test_a_refused_commit_appends_nothing() -> None:
    """[G4] [B5]"""
    pool = new_pool(16)
    view, theirs = allocate(pool, span(1, 4)), lease(pool, 1, session=2)
    own = lease(pool, 1)
    committed = publish(pool, keys("a"), 1)
    stale, twice = BlockRun(own.block_ids, array("Q", [2])), BlockRun(own.block_ids * 2, array("Q", [1, 1]))
    for appended in (theirs, committed, stale, twice):
        with pytest.raises(BlockNotHeld):
            finish(pool.commit(1, view.number, Commit(0, appended=appended)))
    with pytest.raises(CursorOutOfRange):
        finish(pool.commit(1, view.number, Commit(0, encode(span(5, 9)), appended=own)))
    pool.check_invariants()
    assert release(pool, own) == 1


def test_a_lost_sessions_blocks_wait_until_it_is_quiet() -> None:
    """[G3] What it may write is in quarantine, what it may read stays held, a shadow's canonical block too."""
    pool = new_pool(16, slice_blocks=2)
    publish(pool, keys("x"), 1, session=2)
    blocks, own = publish(pool, keys("abc"), 3), lease(pool, 4)
    commit(pool, part(own, 0, 1), keys("x"))
    finish(pool.session_quiet(2))
    finish(pool.end_session(1))
    pool.check_invariants()
    assert classes(pool.stats()) == {"free": 8, "active": 4, "quarantined": 4}
    finish(pool.writers_quiet(1))
    pool.check_invariants()
    assert classes(pool.stats()) == {"free": 12, "active": 4}
    assert pool.holding(1) == Holding(0, 0, 4, 0)
    finish(pool.session_quiet(1))
    pool.check_invariants()
    assert classes(pool.stats()) == {"free": 12, "cached": 4}
    order = [block for block in pool._state.blocks.evictable if block in blocks.block_ids]
    assert order == list(reversed(blocks.block_ids))
