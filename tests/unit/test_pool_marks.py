"""What sessions say they compute block by block: pending for others, until it is committed or nothing has been. [B6]"""

from itertools import pairwise

import pytest
from block_calls import acquire, commit, invalidate, keys, lease, part, publish, release, tokens
from calls import allocate, new_pool, prompt, span

from kvharbor.pool import Awaited, ExtraKey, Outlook, Pending, Pool, marks
from kvharbor.pool.marks import MAX_MARKS, Mark
from kvharbor.pool.steps import finish
from kvharbor.pool.writers import LONGEST_STEP_S, PATIENCE_S


def pending(pool: Pool, names: str, session: int = 2) -> tuple[int, int] | None:
    """How many blocks another session is computing behind what is there, and which."""
    found = acquire(pool, keys(names), session=session)
    release(pool, found.held, session)
    return None if found.pending is None else (found.pending.token_count // 4, found.pending.session)


def test_what_a_session_computes_is_pending_for_others() -> None:
    """[W2] As much of it as the chains have in common, behind what is there; never for the session itself."""
    pool = new_pool(16)
    first = publish(pool, keys("a"), 1)
    found = acquire(pool, keys("abcd"), 4, computes=True)
    assert found.pending is None
    assert pending(pool, "abcd") == (3, 1)
    assert pending(pool, "abcx") == (2, 1)
    assert pending(pool, "ax") is None
    assert acquire(pool, keys("abcd")).pending is None
    assert pending(pool, "abcd", session=3) is None  # of another tenant
    commit(pool, part(found.leased, 0, 2), keys("bc", "a"), first)
    assert pending(pool, "abcd") == (1, 1)
    assert pending(pool, "abcx") is None
    commit(pool, part(found.leased, 2), keys("d", "abc"), part(found.leased, 1, 2))
    assert pending(pool, "abcde") is None
    pool.check_invariants()
    assert not pool._state.marks.by_age


def test_a_chain_that_is_not_to_be_computed_is_not_marked() -> None:
    pool = new_pool(16)
    acquire(pool, keys("ab"), 2)
    assert pending(pool, "ab") is None


def test_a_commit_of_other_contents_does_not_move_a_mark() -> None:
    """Nor does a part of it that goes another way, and one that begins before it does."""
    pool = new_pool(16)
    acquire(pool, keys("ab"), computes=True)
    acquire(pool, keys("xyz"), computes=True)
    own = lease(pool, 3)
    commit(pool, own, keys("xyq"))
    assert pending(pool, "ab") == (2, 1)
    assert pending(pool, "xyz") == (1, 1)
    pool.check_invariants()


def test_a_mark_moves_as_far_as_a_commit_has_come() -> None:
    """[B3] Where all room is claimed, that stops at a cached block which has its content, and makes way first."""
    pool = new_pool(12, slice_blocks=4)
    acquire(pool, keys("abc"), computes=True)
    own = lease(pool, 3)
    theirs = publish(pool, keys("abc"), 3, session=2)
    release(pool, part(theirs, 1), session=2)
    under_way = pool.lease(2, 8, 8)
    next(under_way)
    assert pool.available_block_count == 0
    assert [shadow.position for shadow in commit(pool, own, keys("abc"))] == [0]
    finish(under_way)
    assert not pool._state.marks.by_age
    pool.check_invariants()


def test_a_mark_ends_when_nothing_has_been_committed_for_a_while() -> None:
    """[W5] Each commit gives it time."""
    pool = new_pool(16)
    found = acquire(pool, keys("abc"), 3, computes=True)
    pool.tell_time(1.5)
    commit(pool, part(found.leased, 0, 1), keys("a"))
    pool.tell_time(3.4)
    assert acquire(pool, keys("abc"), session=2).pending == Pending(8, 1, 3.4 - 1.5)
    pool.tell_time(3.5)
    assert pending(pool, "abc") is None
    assert not pool._state.writers.by_key
    pool.check_invariants()


def test_of_a_session_s_marks_the_one_that_got_on_last_is_told() -> None:
    """[W2] [W5] Not one that was only acquired again since."""
    pool = new_pool(16)
    acquire(pool, keys("abc"), computes=True)
    pool.tell_time(1.5)
    acquire(pool, keys("ab"), computes=True)
    acquire(pool, keys("abc"), computes=True)
    assert acquire(pool, keys("abc"), session=2).pending == Pending(8, 1, 0.0)
    pool.check_invariants()


def test_marks_of_equal_tokens_differ_by_their_extra_keys() -> None:
    """[G1] Each is known by its own, and moves with its own commits."""
    pool = new_pool(16)
    plain, image = tokens(span(1, 12)), tokens(span(1, 12), [ExtraKey(9, b"image")])
    acquire(pool, plain, computes=True)
    assert acquire(pool, image, session=2).pending == Pending(8, 1, 0.0)
    acquire(pool, image, computes=True)
    assert acquire(pool, image, session=2).pending == Pending(12, 1, 0.0)
    own = lease(pool, 3)
    commit(pool, own, image)
    assert acquire(pool, plain, session=2).pending == Pending(4, 1, 0.0)
    assert acquire(pool, image, session=2).pending is None
    pool.check_invariants()


def test_a_mark_ends_with_the_hold_of_what_is_before_it() -> None:
    """[G8] The node could be anybody's later."""
    pool = new_pool(16)
    first = publish(pool, keys("ab"), 2)
    acquire(pool, keys("abcd"), computes=True)
    release(pool, part(first, 1))
    assert pending(pool, "abcd") is None
    pool.check_invariants()


def test_a_mark_ends_when_what_is_before_it_is_invalid() -> None:
    """[B4]"""
    pool = new_pool(16)
    first = publish(pool, keys("ab"), 2)
    acquire(pool, keys("abc"), computes=True)
    invalidate(pool, part(first, 1))
    pool.check_invariants()
    assert not pool._state.marks.by_age


def test_marks_end_with_their_session() -> None:
    pool = new_pool(16)
    acquire(pool, keys("ab"), computes=True)
    acquire(pool, tokens(span(1, 8)), computes=True)
    finish(pool.end_session(1))
    assert pending(pool, "ab") is None
    pool.check_invariants()
    assert not pool._state.writers.by_key


def test_a_session_marks_no_more_than_the_pool_has() -> None:
    """What would be more is not marked: at worst it is computed twice."""
    pool = new_pool(4)
    acquire(pool, keys("abc"), computes=True)
    acquire(pool, keys("xy"), computes=True)
    assert pending(pool, "abc") == (3, 1)
    assert pending(pool, "xy") is None
    pool.check_invariants()


def test_an_allocate_waits_for_what_a_session_computes_block_by_block() -> None:
    """[W3] It is told to look again with each commit, and goes on alone when the mark is over."""
    pool = new_pool(16)
    found = acquire(pool, tokens(span(1, 12)), 3, computes=True)
    assert allocate(pool, span(1, 13), session=2).pending == Pending(12, 1, 0.0)
    awaited = finish(pool.allocate_unless_pending(2, prompt(span(1, 9)), max_cached_tokens=8))
    assert not isinstance(awaited, Awaited), "its own session computes that already"
    other = new_pool(16)
    found = acquire(other, tokens(span(1, 12)), 3, computes=True)
    awaited = finish(other.allocate_unless_pending(2, prompt(span(1, 9)), max_cached_tokens=8))
    assert isinstance(awaited, Awaited)
    commit(other, part(found.leased, 0, 1), tokens(span(1, 4)))
    assert other.drain_moved() == [awaited]
    assert other.look_again(awaited) is Outlook.PENDING
    other.tell_time(2.0)
    assert other.drain_moved() == [awaited]
    assert other.look_again(awaited) is Outlook.ABANDONED
    other.check_invariants()


def test_a_sequence_is_pending_for_an_acquire() -> None:
    """[W2]"""
    pool = new_pool(16)
    allocate(pool, span(1, 12), session=2)
    assert acquire(pool, tokens(span(1, 8))).pending == Pending(8, 2, 0.0)


def test_of_two_that_compute_the_same_the_first_is_the_writer() -> None:
    """[W3] Who is told of another may wait for that, and nobody must wait for him then, until it is his to compute."""
    pool = new_pool(16)
    pool.open_session(4, "t")
    acquire(pool, keys("ab"), computes=True)
    assert acquire(pool, keys("abc"), session=2, computes=True).pending == Pending(8, 1, 0.0)
    assert acquire(pool, keys("abc")).pending is None
    finish(pool.end_session(1))
    assert acquire(pool, keys("abc"), session=4).pending is None
    assert acquire(pool, keys("abc"), session=2, computes=True).pending is None
    assert acquire(pool, keys("abc"), session=4).pending == Pending(12, 2, 0.0)


def test_who_takes_over_from_one_that_has_stalled_is_the_writer_then() -> None:
    """[W5] A mark that has stalled and is still there is told, and keeps nobody from being one."""
    pool = new_pool(16)
    pool.open_session(4, "t")
    acquire(pool, keys("ab"), computes=True)
    pool.tell_time(1.0)
    pool.note_computing(1)
    pool.tell_time(2.5)  # when it is looked at, and found to last until 3.0
    pool.tell_time(3.5)
    assert acquire(pool, keys("ab"), session=2, computes=True).pending == Pending(8, 1, 2.5)
    assert acquire(pool, keys("ab"), session=4).pending == Pending(8, 2, 0.0)
    pool.check_invariants()


def test_a_mark_lasts_while_its_session_says_that_it_is_at_work() -> None:
    """[W7] Every mark of the session, and no other's; not for ever, but that a commit gives it time anew."""
    pool = new_pool(16)
    found = acquire(pool, keys("abc"), 3, computes=True)
    acquire(pool, keys("x"), computes=True)
    acquire(pool, keys("y"), session=2, computes=True)
    for now in range(1, int(LONGEST_STEP_S)):
        pool.tell_time(float(now))
        pool.note_computing(1)
        assert [pending(pool, names) for names in ("abc", "x")] == [(3, 1), (1, 1)]
        assert len(pool._state.marks.by_age) == (3 if now < PATIENCE_S else 2)
        pool.check_invariants()
    commit(pool, part(found.leased, 0, 1), keys("a"))
    pool.tell_time(LONGEST_STEP_S)
    pool.note_computing(1)
    assert [pending(pool, names) for names in ("abc", "x")] == [(2, 1), None]
    assert acquire(pool, keys("abc"), session=2).pending == Pending(8, 1, 0.0)
    pool.tell_time(LONGEST_STEP_S + PATIENCE_S)
    assert not pool._state.marks.by_age
    pool.check_invariants()


def test_what_a_session_has_said_ends_with_it() -> None:
    """[W7]"""
    pool = new_pool(16)
    pool.note_computing(1)
    finish(pool.end_session(1))
    assert not pool._state.writers.signs
    pool.check_invariants()


def test_what_is_pending_ends_where_extra_keys_differ() -> None:
    """[G1] Counted from what is there."""
    pool = new_pool(16)
    publish(pool, tokens(span(1, 8)), 2)
    acquire(pool, tokens(span(1, 20), [ExtraKey(13, b"image")]), computes=True)
    assert acquire(pool, tokens(span(1, 20)), session=2).pending == Pending(4, 1, 0.0)


def test_a_session_marks_so_many_chains_at_most_and_they_end_some_at_a_time() -> None:
    """[S14] What one of them does may concern all: here each is behind the root. Those that do not fit are no marks."""
    pool = new_pool(2 * MAX_MARKS)
    for number in range(MAX_MARKS + 3):
        acquire(pool, tokens(4 * [number]), computes=True)
    entered = pool._state.marks.by_age
    assert len(entered) == MAX_MARKS
    pool.check_invariants()
    assert acquire(pool, tokens(4 * [0]), session=2).pending is not None
    assert acquire(pool, tokens(4 * [MAX_MARKS]), session=2).pending is None
    own = lease(pool, 1)
    commit(pool, own, tokens(4 * [1]))
    assert len(entered) == MAX_MARKS - 1
    acquire(pool, tokens(4 * [MAX_MARKS]), computes=True)
    pool.tell_time(3.0)
    counts = [MAX_MARKS]
    while entered:
        counts.append(len(entered))
        pool.tell_time(3.0)
    assert max(before - after for before, after in pairwise(counts)) < MAX_MARKS // 2
    pool.check_invariants()


def test_only_marks_of_what_is_committed_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """[S14] However many others there are behind the same block."""
    pool = new_pool(1024)
    for number in range(500):
        acquire(pool, tokens(4 * [number]), computes=True)
    compared: list[Mark] = []

    def extras_to_come(mark: Mark) -> dict[int, bytes]:
        compared.append(mark)
        return {}

    monkeypatch.setattr(marks, "extras_to_come", extras_to_come)
    acquire(pool, tokens(4 * [500]), computes=True)
    acquire(pool, tokens(4 * [7]), computes=True)
    commit(pool, lease(pool, 1), tokens(4 * [7]))
    assert len(compared) <= 4
    assert len(pool._state.marks.by_age) == 500
