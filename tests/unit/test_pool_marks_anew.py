"""A session that acquires anew what it is to compute, which another may have published; and extra keys. [B6]"""

from array import array

import pytest
from block_calls import abandon, acquire, backwards, commit, keys, lease, part, publish, release, tokens
from calls import encode, new_pool, span

from kvharbor.pool import Chain, ExtraKey, Pending, Pool
from kvharbor.pool.steps import finish
from kvharbor.pool.writers import LONGEST_STEP_S, PATIENCE_S

BLOCK_TOKENS = 4


def left(pool: Pool) -> list[tuple[int, bytes]]:
    """The marks: whose, and of what. All that is known of them must agree."""
    pool.check_invariants()
    return [(mark.session, bytes(mark.tail)) for mark in pool._state.marks.by_age]


def test_to_acquire_again_what_one_computes_says_that_one_is_at_work() -> None:
    """[W5] [W7] A request that begins again, as one that gave way, is not taken for one that has stalled."""
    pool = new_pool(16)
    acquire(pool, keys("abc"), computes=True)
    pool.tell_time(PATIENCE_S - 0.5)
    acquire(pool, keys("abc"), computes=True)
    assert len(pool._state.marks.by_age) == 1
    pool.tell_time(PATIENCE_S + 0.5)
    assert acquire(pool, keys("abc"), session=2).pending == Pending(3 * BLOCK_TOKENS, 1, 1.0)
    pool.check_invariants()


@pytest.mark.parametrize("pause_s", [0.25, 0.5, PATIENCE_S - 0.25])
def test_nobody_stands_back_for_longer_than_a_step_for_one_that_only_asks(pause_s: float) -> None:
    """[W7] It says that it is at work, and asks again and again, each time before others do."""
    pool = new_pool(16)
    for tick in range(int(4 * LONGEST_STEP_S)):
        pool.tell_time(tick / 4)
        pool.note_computing(1)
        if tick % int(4 * pause_s) == 0:
            acquire(pool, keys("abc"), computes=True)
        assert acquire(pool, keys("abc"), session=2, computes=True, unless_pending=True).stands_back
    pool.tell_time(LONGEST_STEP_S)
    pool.note_computing(1)
    acquire(pool, keys("abc"), computes=True)
    assert not acquire(pool, keys("abc"), session=2, computes=True, unless_pending=True).stands_back
    assert acquire(pool, keys("abc"), computes=True, unless_pending=True).pending == Pending(3 * BLOCK_TOKENS, 2, 0.0)
    pool.check_invariants()


def test_one_that_has_only_asked_begins_anew_once_others_could_take_over() -> None:
    """[B6] It asks no more, long enough for all that stand back to ask."""
    pool = new_pool(16)
    for second in range(int(LONGEST_STEP_S) + 1):
        pool.tell_time(float(second))
        acquire(pool, keys("abc"), computes=True)
    pool.tell_time(LONGEST_STEP_S + PATIENCE_S - 0.5)
    assert len(left(pool)) == 1
    pool.tell_time(LONGEST_STEP_S + PATIENCE_S)
    assert left(pool) == []
    acquire(pool, keys("abc"), computes=True)
    assert acquire(pool, keys("abc"), session=2, unless_pending=True).stands_back


def test_extra_keys_that_are_committed_count_no_more() -> None:
    """Else a session that computes long chains of images would be refused marks for what it has done."""
    pool = new_pool(16)
    text = array("I", [7] * 4 * BLOCK_TOKENS).tobytes()
    extra = (ExtraKey(0, b"k" * 60),)
    finish(pool.acquire(1, Chain(token_ids=text, extra_keys=extra), computes=True))
    (mark,) = pool._state.marks.by_age
    assert pool._state.marks.block_counts[1] == pool._state.marks.size(mark) > 4
    commit(pool, lease(pool, 1), Chain(token_ids=text[: 4 * BLOCK_TOKENS], extra_keys=extra))
    assert pool._state.marks.block_counts[1] == pool._state.marks.size(mark) == 3
    pool.check_invariants()


def test_a_mark_does_not_outlive_what_another_has_published_first() -> None:
    """[W8] Nobody stands back for it once that is evicted."""
    pool = new_pool(16)
    acquire(pool, keys("abc"), computes=True)
    theirs = publish(pool, keys("abc"), 3, session=2)
    assert left(pool) == [(1, keys("abc").keys)]
    own = acquire(pool, keys("abc")).held
    assert left(pool) == []
    release(pool, backwards(own))
    release(pool, backwards(theirs), session=2)
    lease(pool, 16, session=3)
    assert not acquire(pool, keys("abc"), session=2, computes=True, unless_pending=True).stands_back


def test_it_moves_over_what_its_session_acquires() -> None:
    """As far as they agree, whatever for, and behind what it has come to; it has got on by that."""
    pool = new_pool(16)
    publish(pool, keys("a"), 1)
    for names in ("abcd", "axy", "b"):
        acquire(pool, keys(names), computes=True)
    before = left(pool)
    commit(pool, lease(pool, 4, session=2), keys("abce"), session=2)
    pool.tell_time(PATIENCE_S - 0.5)
    acquire(pool, keys("abc"), session=2)
    assert left(pool) == before, "that was another session"
    acquire(pool, keys("abce"))
    assert left(pool) == [before[1], before[2], (1, keys("d", "abc").keys)]
    pool.tell_time(PATIENCE_S + 0.5)
    assert left(pool) == [(1, keys("d", "abc").keys)]
    abandon(pool, keys("abcd"))
    assert left(pool) == []


def test_one_that_is_asked_for_again_is_one_mark() -> None:
    """Its own acquire brings it to where the new one would be."""
    pool = new_pool(16)
    acquire(pool, keys("abc"), computes=True)
    publish(pool, keys("a"), 1, session=2)
    acquire(pool, keys("abc"), computes=True)
    assert left(pool) == [(1, keys("bc", "a").keys)]


def test_it_does_not_move_over_what_is_not_given() -> None:
    """[W8] Its session may never hold that."""
    pool = new_pool(16)
    acquire(pool, keys("abx"), computes=True)
    publish(pool, keys("ab"), 2, session=2)
    acquire(pool, keys("abc"), session=2, computes=True)
    assert acquire(pool, keys("abc"), unless_pending=True).stands_back
    assert left(pool)[0] == (1, keys("abx").keys)


def test_it_moves_only_over_blocks_of_its_own_extra_keys() -> None:
    """[G1]"""
    pool = new_pool(16)
    images = [tokens(span(1, 12), [ExtraKey(place, b"image")]) for place in (6, 9)]
    for image in images:
        acquire(pool, image, computes=True)
    publish(pool, images[0], 3, session=2)
    acquire(pool, images[0])
    assert left(pool) == [(1, images[1].token_ids[4 * BLOCK_TOKENS :])]


def test_it_moves_over_a_long_chain_slice_by_slice() -> None:
    """[B6] Never behind what its session does not hold yet, or any more."""
    names = list(range(20))
    pool = new_pool(64, slice_blocks=4)
    acquire(pool, keys([*names, "x"]), computes=True)
    publish(pool, keys(names), 20, session=2)
    places: list[int] = []
    for _ in pool.acquire(1, keys(names)):
        left(pool)
        places += [mark.committed_blocks for mark in pool._state.marks.by_age]
    assert sorted(set(places)) == [0, 4, 8, 12, 16, 20]
    assert left(pool) == [(1, keys("x", names).keys)]
    release(pool, part(acquire(pool, keys(names)).held, 19))
    assert left(pool) == []


def test_a_mark_moves_behind_blocks_with_extra_keys() -> None:
    """[B6] Keys of blocks before the mark's are not its affair."""
    pool = new_pool(16)
    extra = [ExtraKey(0, b"k")]
    publish(pool, tokens(span(1, 4), extra), 1)
    acquire(pool, tokens(span(1, 16), extra), computes=True)
    commit(pool, lease(pool, 2, session=2), tokens(span(1, 8), extra), session=2)
    acquire(pool, tokens(span(1, 8), extra))
    pool.check_invariants()
    assert [bytes(mark.tail) for mark in pool._state.marks.by_age] == [encode(span(9, 16))]
