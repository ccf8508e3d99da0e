"""Chains that a session does not compute any more: nobody is told of them, nor waits for them. [B8]"""

import pytest
from block_calls import abandon, acquire, commit, keys, lease, part, publish, release, tokens
from calls import new_pool, prompt, span

from kvharbor.pool import Awaited, Chain, ExtraKey, Outlook, Pool
from kvharbor.pool.errors import InvalidField
from kvharbor.pool.steps import finish


def pending(pool: Pool, chain: Chain, session: int = 2) -> int | None:
    """How many blocks another session is computing behind what is there."""
    found = acquire(pool, chain, session=session)
    release(pool, found.held, session)
    return None if found.pending is None else found.pending.token_count // 4


def test_nobody_is_told_of_it_any_more() -> None:
    """And another may be the one who computes it, at once."""
    pool = new_pool(16)
    given = acquire(pool, keys("abc"), 3, computes=True)
    assert acquire(pool, keys("abc"), session=2, computes=True, unless_pending=True).stands_back
    abandon(pool, keys("abc"))
    taken_over = acquire(pool, keys("abc"), 3, session=2, computes=True, unless_pending=True)
    assert (len(taken_over.leased), taken_over.pending) == (3, None)
    assert acquire(pool, keys("abc")).pending is not None
    assert release(pool, given.leased) == 3, "what it has leased stays its own"
    pool.check_invariants()


def test_it_is_found_where_its_commits_have_brought_it() -> None:
    pool = new_pool(16)
    given = acquire(pool, keys("abcd"), 4, computes=True)
    commit(pool, part(given.leased, 0, 2), keys("ab"))
    assert pending(pool, keys("abcd")) == 2
    abandon(pool, keys("abcd"))
    assert pending(pool, keys("abcd")) is None
    assert not pool._state.marks.by_age
    pool.check_invariants()


def test_chains_of_other_contents_stay() -> None:
    """Those that begin alike and end elsewhere, go on, or end before; and another session's."""
    pool = new_pool(16)
    for names in ("ab", "abc", "abcd", "abx"):
        acquire(pool, keys(names), computes=True)
    acquire(pool, keys("y"), session=2, computes=True)
    for names in ("abc", "a", "b", "y", ""):
        abandon(pool, keys(names))
    left = [bytes(mark.tail) for mark in pool._state.marks.by_age]
    assert left == [keys(names).keys for names in ("ab", "abcd", "abx", "y")]
    pool.check_invariants()


def test_those_that_go_on_stay_behind_what_is_committed_too() -> None:
    pool = new_pool(16)
    publish(pool, keys("a"), 1)
    acquire(pool, keys("abc"), computes=True)
    acquire(pool, keys("abcd"), computes=True)
    abandon(pool, keys("abc"))
    assert [bytes(mark.tail) for mark in pool._state.marks.by_age] == [keys("bcd", "a").keys]
    pool.check_invariants()


def test_a_chain_that_repeats_itself_is_no_shorter_one() -> None:
    pool = new_pool(16)
    acquire(pool, tokens(span(1, 8)), computes=True)
    abandon(pool, tokens(2 * span(1, 8)))
    assert pending(pool, tokens(span(1, 8))) == 2
    pool.check_invariants()


def test_extra_keys_are_contents() -> None:
    """[G1] Wherever they are in the chain, and behind what is committed."""
    pool = new_pool(16)
    plain = tokens(span(1, 12))
    images = [tokens(span(1, 12), [ExtraKey(place, b"image")]) for place in (1, 6, 9)]
    for first in (plain, images[2]):
        for committed in (0, 1):
            pool = new_pool(16)
            if committed:
                publish(pool, tokens(span(1, 4)), 1)
            acquire(pool, first, computes=True)
            for other in {plain, *images} - {first}:
                abandon(pool, other)
            assert len(pool._state.marks.by_age) == 1
            abandon(pool, first)
            assert not pool._state.marks.by_age
            pool.check_invariants()


def test_another_namespace_is_another_chain() -> None:
    pool = new_pool(16)
    acquire(pool, tokens(span(1, 8)), computes=True)
    abandon(pool, tokens(span(1, 8), salt=b"other"))
    assert pending(pool, tokens(span(1, 8))) == 2


def test_what_nothing_is_known_of_is_nothing() -> None:
    """What was never computed, is committed, or was abandoned before. Nothing is made or evicted for it."""
    pool = new_pool(16)
    abandon(pool, keys("abc"))
    publish(pool, keys("abc"), 3)
    revision = pool.revision
    for _ in range(2):
        abandon(pool, keys("abc"))
        abandon(pool, keys("abcd"))
    assert pool.revision == revision
    assert len(pool._state.namespaces) == 1
    pool.check_invariants()


def test_what_is_no_chain_is_refused() -> None:
    pool = new_pool(16)
    with pytest.raises(InvalidField):
        abandon(pool, Chain(keys=b"short", scheme="s"))


def test_who_waits_for_it_looks_again_at_once() -> None:
    """[W3]"""
    pool = new_pool(16)
    acquire(pool, tokens(span(1, 12)), 3, computes=True)
    awaited = finish(pool.allocate_unless_pending(2, prompt(span(1, 9)), max_cached_tokens=8))
    assert isinstance(awaited, Awaited)
    abandon(pool, tokens(span(1, 12)))
    assert pool.drain_moved() == [awaited]
    assert pool.look_again(awaited) is Outlook.ABANDONED
    pool.check_invariants()


def test_a_long_chain_is_looked_for_slice_by_slice() -> None:
    """[S14] As far as the session holds it, behind which it has no mark."""
    names = list(range(20))
    pool = new_pool(64, slice_blocks=4)
    own = publish(pool, keys(names[:10]), 10)
    acquire(pool, keys(names), computes=True)
    assert len(list(pool.abandon(1, keys(names)))) == 2
    assert not pool._state.marks.by_age
    release(pool, part(own, 4))
    acquire(pool, keys("x"), computes=True)
    assert len(list(pool.abandon(1, keys(names)))) == 1
    abandon(pool, keys("x"))
    assert list(pool.abandon(1, keys(names))) == []
    pool.check_invariants()


def test_what_is_evicted_between_two_slices_is_not_looked_at() -> None:
    """[B2] The session does not hold it, and what has its place then may be anybody's."""
    names = list(range(9))
    pool = new_pool(16, slice_blocks=4)
    own = publish(pool, keys(names), 9, session=2)
    acquire(pool, keys(names[:4]))
    acquire(pool, keys("x"), computes=True)
    release(pool, own, session=2)
    steps = pool.abandon(1, keys(names))
    next(steps)
    lease(pool, 12, session=2)
    assert list(steps) == []
    pool.check_invariants()
