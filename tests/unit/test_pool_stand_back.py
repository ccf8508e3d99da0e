"""Chains that are given nothing while another session computes what comes next. [W8]"""

import pytest
from block_calls import acquire, backwards, commit, keys, lease, part, publish, release, tokens
from calls import allocate, new_pool, span
from restarts import Restarts

from kvharbor.pool import Acquired, Chain, ExtraKey, Pending, Pool
from kvharbor.pool.errors import PoolExhausted, RequestTooLarge
from kvharbor.pool.steps import finish
from kvharbor.pool.writers import PATIENCE_S


def ask(pool: Pool, chain: Chain, table: int = 0, session: int = 2) -> Acquired:
    """As an engine that computes what nobody else does."""
    found = acquire(pool, chain, table, session, computes=True, unless_pending=True)
    pool.check_invariants()
    return found


def counts(found: Acquired) -> tuple[int, int, int]:
    """Blocks that are held, leased, and told to be pending."""
    return len(found.held), len(found.leased), 0 if found.pending is None else found.pending.token_count // 4


def test_nothing_is_done_but_to_tell() -> None:
    """No hold, no lease, no mark, no request, nobody's place in the order of eviction, and no word in the ledger."""
    process = Restarts(16)
    pool = process.pool
    release(pool, backwards(publish(pool, keys("ab"), 2)))
    release(pool, publish(pool, keys("x"), 1))
    allocated = acquire(pool, keys("abcd"), 4, computes=True)
    release(pool, backwards(allocated.held))
    acquire(pool, keys("abcd"), 4, computes=True)
    before, order, words = pool.stats(), list(pool._state.blocks.evictable), bytes(process.buffer)
    found = ask(pool, keys("abcdef"), 7)
    assert (counts(found), len(found.added), found.stands_back) == ((0, 0, 2), 0, True)
    assert found.pending == Pending(8, 1, 0.0)
    assert (pool.stats(), list(pool._state.blocks.evictable), bytes(process.buffer)) == (before, order, words)
    assert acquire(pool, keys("abcd"), session=1).pending is None, "it is told to compute it"


def test_what_nobody_else_computes_is_given() -> None:
    """And what is wholly there; the next one stands back for who was given it."""
    pool = new_pool(16)
    pool.open_session(4, "t")
    publish(pool, keys("ab"), 2)
    assert counts(ask(pool, keys("ab"))) == (2, 0, 0)
    assert counts(ask(pool, keys("abc"), 3)) == (2, 1, 0)
    assert counts(ask(pool, keys("abcd"), 4, session=4)) == (0, 0, 1)
    assert counts(ask(pool, keys("ax"), 2, session=4)) == (1, 1, 0)


def test_two_chains_of_one_session_stand_back_and_go_on_together() -> None:
    """[W4] The first takes over and is a writer then; the second is its own session's, and so is no other's affair."""
    pool = new_pool(16)
    pool.open_session(4, "t")
    acquire(pool, keys("ab"), 2, session=1, computes=True)
    assert [counts(ask(pool, chain, 3)) for chain in (keys("abc"), keys("abd"))] == [(0, 0, 2), (0, 0, 2)]
    finish(pool.end_session(1))
    assert [counts(ask(pool, chain, 3)) for chain in (keys("abc"), keys("abd"))] == [(0, 3, 0), (0, 3, 0)]
    assert counts(ask(pool, keys("abd"), 3, session=4)) == (0, 0, 3)


def test_who_has_stalled_is_waited_for_no_more() -> None:
    """[W5] [W7] But as long as it says that it is at work. Who takes over is waited for by the next."""
    pool = new_pool(16)
    pool.open_session(4, "t")
    first = acquire(pool, keys("ab"), 2, computes=True)
    pool.tell_time(1.0)
    pool.note_computing(1)
    pool.tell_time(1.0 + PATIENCE_S - 0.1)
    assert counts(ask(pool, keys("ab"), 2)) == (0, 0, 2)
    pool.tell_time(1.0 + PATIENCE_S)
    assert counts(ask(pool, keys("ab"), 2))[:2] == (0, 2)
    assert ask(pool, keys("ab"), 2, session=4).pending == Pending(8, 2, 0.0)
    assert commit(pool, first.leased, keys("ab")) == []
    assert counts(ask(pool, keys("ab"), 2, session=4)) == (2, 0, 0)


def test_a_session_that_computes_it_too_does_not_stand_back() -> None:
    """[W4] Whatever another does, it is there when its own step is over. Where it wants no blocks it is given none."""
    pool = new_pool(16)
    allocate(pool, span(1, 8), session=1)
    allocate(pool, span(1, 8), session=2)
    for table in (0, 2):
        found = ask(pool, tokens(span(1, 8)), table)
        assert (counts(found), found.stands_back) == ((0, table, 2), False)
        assert found.pending == Pending(8, 1, 0.0)


def test_a_full_pool_is_no_matter_to_who_stands_back() -> None:
    """He takes no room. What can never fit is told at once."""
    pool = new_pool(4)
    acquire(pool, keys("ab"), 2, computes=True)
    lease(pool, 2)
    assert counts(ask(pool, keys("ab"), 4)) == (0, 0, 2)
    with pytest.raises(PoolExhausted):
        ask(pool, keys("xy"), 2)
    with pytest.raises(RequestTooLarge):
        ask(pool, keys("ab"), 5)


def test_extra_keys_and_tenants_tell_prompts_apart() -> None:
    """[G8] Session 3 is of another tenant."""
    pool = new_pool(16)
    acquire(pool, tokens(span(1, 8), [ExtraKey(5, b"cat")]), 2, computes=True)
    assert counts(ask(pool, tokens(span(1, 8), [ExtraKey(5, b"cat")]), session=3)) == (0, 0, 0)
    assert counts(ask(pool, tokens(span(1, 8), [ExtraKey(5, b"cat")]))) == (0, 0, 2)
    assert counts(ask(pool, tokens(span(1, 8), [ExtraKey(5, b"dog")]))) == (0, 0, 1)
    assert counts(ask(pool, tokens(span(1, 8), [ExtraKey(1, b"dog")]))) == (0, 0, 0)


def test_a_match_that_is_too_short_to_use_is_worth_waiting_behind() -> None:
    """What others compute makes it longer."""
    pool = new_pool(16, min_reuse_tokens=12)
    found = acquire(pool, keys("abcd"), 4, computes=True)
    commit(pool, part(found.leased, 0, 2), keys("ab"))
    assert counts(ask(pool, keys("abcd"), 4)) == (0, 0, 2)
    commit(pool, part(found.leased, 2), keys("cd", "ab"), part(found.leased, 1, 2))
    assert counts(ask(pool, keys("abcd"), 4)) == (4, 0, 0)


def test_marks_end_with_the_process_and_who_stood_back_takes_over() -> None:
    """[G7] The next process knows of no mark, so it has one of those who ask compute."""
    process = Restarts(16)
    acquire(process.pool, keys("ab"), 2, computes=True)
    assert counts(ask(process.pool, keys("ab"), 2)) == (0, 0, 2)
    pool = process.restart()
    process.finish_resume(1, 2, 3)
    assert counts(ask(pool, keys("ab"), 2)) == (0, 2, 0)
    assert counts(ask(pool, keys("ab"), 2, session=1)) == (0, 0, 2)


def test_extra_keys_of_the_next_block_tell_whether_it_is_computed() -> None:
    """Another image is another block."""
    pool = new_pool(16)
    chain = tokens(span(1, 8), [ExtraKey(1, b"k")])
    acquire(pool, chain, 2, computes=True)
    assert ask(pool, chain, 2).stands_back
    assert not ask(pool, tokens(span(1, 8)), 2).stands_back


def test_who_is_given_a_long_chain_computes_it_from_then_on() -> None:
    """[W3] Between the slices in which its session takes over what is there, too."""
    pool = new_pool(16, slice_blocks=1)
    publish(pool, tokens(span(1, 12)), 3)
    chain = tokens(span(1, 16))
    given = pool.acquire(1, chain, 4, computes=True)
    assert any(pool._state.writers.by_key for _ in given)
    assert ask(pool, chain, 4).stands_back
    finish(given)
    pool.check_invariants()
