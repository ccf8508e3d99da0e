"""What callers might fill memory with: extra keys and names without end, and contents that are all followed."""

import pytest
from block_calls import NONE, acquire, commit, lease, part, tokens
from calls import encode, new_pool, span

from kvharbor.pool import Commit, ExtraKey, Prompt
from kvharbor.pool.errors import InvalidField, WarmBudgetExceeded
from kvharbor.pool.reuse import MOST_FOLLOWED, ReuseTimes
from kvharbor.pool.steps import finish
from kvharbor.pool.validate import LEAST_EXTRA_BYTES

KEY = ExtraKey(0, bytes(240))  # 256 bytes, encoded
MOST = LEAST_EXTRA_BYTES // 256  # of such in a block of 4 tokens


def test_a_block_has_extra_keys_of_bounded_size() -> None:
    """As many as there are places for, and no more in any call; nothing of a refused call takes effect."""
    pool = new_pool(16)
    allowed = Prompt(encode(span(1, 4)), (KEY,) * MOST)
    view = finish(pool.allocate(1, allowed))
    finish(pool.commit(1, view.number, Commit(4)))
    too_many, leased = (KEY,) * (MOST + 1), lease(pool, 1)
    for refused in (
        lambda: pool.allocate(1, Prompt(encode(span(11, 14)), too_many)),
        lambda: pool.acquire(1, tokens(span(11, 14), too_many), 0, computes=True),
        lambda: pool.commit_blocks(1, NONE, leased, tokens(span(11, 14), too_many)),
        lambda: pool.warmup("t", 1, Prompt(encode(span(11, 14)), too_many), "name", expires_at=1.0),
    ):
        with pytest.raises(InvalidField, match="at most 4096 bytes") as error:
            finish(refused())
        assert error.value.attributes["field"] == "extra_keys"
    pool.check_invariants()
    assert pool.stats().sequence_count == 1


def test_commits_of_a_token_each_do_not_add_up_to_more() -> None:
    """Each may name keys of its own token, all of one block."""
    pool = new_pool(16)
    view = finish(pool.allocate(1, Prompt(encode([1])), reserve_tokens=8))
    keys = tuple(ExtraKey(1, KEY.value) for _ in range(MOST))
    finish(pool.commit(1, view.number, Commit(2, encode([2]), keys)))
    more = (ExtraKey(2, b"x"),)
    with pytest.raises(InvalidField, match="extra_keys"):
        finish(pool.commit(1, view.number, Commit(3, encode([3]), more)))
    done = finish(pool.commit(1, view.number, Commit(4, encode([3, 4]))))
    assert done.committed_tokens == 4
    pool.check_invariants()


def test_extra_keys_of_marks_count_as_contents() -> None:
    """[B6] A session marks no more bytes than those of as many contents as the pool has blocks."""
    pool = new_pool(16)
    contents = 1 + 256 // 16  # a block of 4 tokens is 16 bytes
    assert contents > 16
    acquire(pool, tokens(span(1, 4), [KEY]), computes=True)
    assert not pool._state.marks.by_age
    for first in range(11, 61, 10):
        acquire(pool, tokens(span(first, first + 3), [ExtraKey(1, bytes(16))]), computes=True)
        pool.check_invariants()
    assert pool._state.marks.block_counts == {1: 15}
    acquire(pool, tokens(span(91, 94), [ExtraKey(1, bytes(16))]), computes=True)
    assert len(pool._state.marks.by_age) == 5


def test_extra_keys_of_what_is_committed_count_no_more() -> None:
    """[B6] Nor those of what was there already; an odd number of bytes counts as a whole content more."""
    pool = new_pool(32)
    chain = tokens(span(1, 16), [ExtraKey(1, bytes(16)), ExtraKey(5, bytes(17)), ExtraKey(13, b"x")])
    found = acquire(pool, chain, 4, computes=True)
    assert pool._state.marks.block_counts == {1: 4 + 6}
    first = part(found.leased, 0, 1)
    commit(pool, first, tokens(span(1, 4), [ExtraKey(1, bytes(16))]))
    pool.check_invariants()
    assert pool._state.marks.block_counts == {1: 3 + 4}
    acquire(pool, chain, 0, session=2, computes=True)
    pool.check_invariants()
    second = part(found.leased, 1, 2)
    commit(pool, second, tokens(span(5, 8), [ExtraKey(1, bytes(17))]), first)
    pool.check_invariants()
    assert pool._state.marks.block_counts[1] == 2 + 2


def test_a_pool_has_no_more_pins_than_its_budget_has_blocks() -> None:
    """Any number of names might have the same blocks, and nothing would bound their memory."""
    pool = new_pool(16, warm_budget_ratio=0.25)
    view = finish(pool.allocate(1, Prompt(encode(span(1, 4)))))
    finish(pool.commit(1, view.number, Commit(4)))
    finish(pool.release(1, view.number))

    def pin(name: str) -> None:
        finish(pool.warmup("t", 1, Prompt(encode(span(1, 4))), name, present_only=True))

    for number in range(4):
        pin(f"name {number}")
    with pytest.raises(WarmBudgetExceeded) as refused:
        pin("one more")
    assert refused.value.attributes == {"needed_block_count": 1, "warm_block_count": 4, "budget_block_count": 4}
    pool.check_invariants()
    pin("name 0")
    finish(pool.unwarm("t", "name 1"))
    pin("one more")
    pool.check_invariants()


def test_a_sample_is_bounded_whatever_contents_are_chosen() -> None:
    """[H1] Those that are over it count for nothing, so that nobody's blocks seem to be asked for less."""
    times = ReuseTimes(100_000, 8)
    for content in range(2 * MOST_FOLLOWED):
        times.released(content * (times.sample_mask + 1), 0, content)
    assert len(times._followed) == MOST_FOLLOWED
    assert times._releases[0] == MOST_FOLLOWED


def test_a_content_that_is_released_again_and_again_keeps_no_others() -> None:
    """Blocks of equal keys in several namespaces are one content here: it has its place by its last release."""
    times = ReuseTimes(100, 8)
    for now in range(10_000):
        times.released(0, 0, now)
        times.released(1 + now, 0, now)
        times.advance(now)
    assert len(times._followed) < 2_000
