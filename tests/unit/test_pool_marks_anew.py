"""A session that says once more that it computes a chain, and marks whose extra keys count too. [B6]"""

from array import array

from block_calls import acquire, commit, keys, lease
from calls import new_pool

from kvharbor.pool import Chain, ExtraKey
from kvharbor.pool.steps import finish
from kvharbor.pool.writers import PATIENCE_S

BLOCK_TOKENS = 4


def test_a_mark_that_is_made_again_has_got_on() -> None:
    """[W5] A request that begins again, as one that gave way, is not taken for one that has stalled."""
    pool = new_pool(16)
    acquire(pool, keys("abc"), computes=True)
    pool.tell_time(PATIENCE_S - 0.5)
    acquire(pool, keys("abc"), computes=True)
    assert len(pool._state.marks.by_age) == 1
    pool.tell_time(PATIENCE_S + 0.5)
    found = acquire(pool, keys("abc"), session=2)
    assert found.pending is not None
    assert (found.pending.session, found.pending.idle_s) == (1, 1.0)
    pool.check_invariants()


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
