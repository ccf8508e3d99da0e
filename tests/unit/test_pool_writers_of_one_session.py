"""Several writers of one session at one block: others are told of the one that gets on. [W2] [W5]"""

import pytest
from block_calls import acquire, keys
from calls import allocate, commit, new_pool, span

from kvharbor.pool.writers import PATIENCE_S


@pytest.mark.parametrize("working", [0, 1])
def test_the_writer_that_got_on_last_is_the_one_that_counts(working: int) -> None:
    """Two requests of an engine have the same prompt, and one of them stands still."""
    pool = new_pool(16)
    views = [allocate(pool, span(1, 8)) for _ in range(2)]
    pool.tell_time(PATIENCE_S - 0.5)
    commit(pool, views[working], 2)  # a part of the block
    pool.tell_time(PATIENCE_S + 0.5)
    found = allocate(pool, span(1, 8), session=2)
    assert found.pending is not None
    assert (found.pending.session, found.pending.idle_s) == (1, 1.0)
    pool.check_invariants()


def test_what_is_kept_of_a_sessions_marks_goes_with_the_last() -> None:
    """[B6] Sessions come and go for years."""
    pool = new_pool(16)
    acquire(pool, keys("ab"), computes=True)
    assert pool._state.marks.by_session
    pool.tell_time(PATIENCE_S)
    marks = pool._state.marks
    assert [len(each) for each in (marks.by_session, marks.by_age, marks.block_counts, marks.counts)] == [0] * 4
