"""Warm pins: budget, promise, moving, expiry, and what becomes of the sequence that fills one."""

import pytest
from calls import allocate, cache, classes, commit, encode, new_pool, present, prompt, publish, release, span

from kvharbor.pool import Commit, PinStats, Pool, SequenceView, Warmed
from kvharbor.pool.errors import PinNotFound, WarmBudgetExceeded
from kvharbor.pool.events import PinEnded
from kvharbor.pool.steps import finish


def warm(
    pool: Pool,
    tokens: list[int],
    name: str = "w",
    session: int | None = 1,
    *,
    expires_at: float | None = None,
    present_only: bool = False,
) -> Warmed:
    return finish(pool.warmup("t", session, prompt(tokens), name, expires_at=expires_at, present_only=present_only))


def filler(warmed: Warmed) -> SequenceView:
    assert warmed.sequence is not None
    return warmed.sequence


def used(pool: Pool) -> int:
    return pool.stats().warm_budget_used_block_count


def pin_ends(pool: Pool) -> list[tuple[str, bool]]:
    return [(event.name, event.expired) for event in pool.drain_events() if isinstance(event, PinEnded)]


def test_present_blocks_are_pinned_at_once_and_missing_ones_at_their_commit() -> None:
    """Missing blocks count from the reply on; each becomes warm when it is committed and let go."""
    pool = new_pool(16)
    cache(pool, span(1, 4))
    warmed = warm(pool, span(1, 14))
    assert (warmed.pinned_tokens, warmed.missing_tokens, used(pool)) == (4, 8, 3)
    view = filler(warmed)
    assert (view.cached_tokens, view.token_count, view.capacity_tokens) == (4, 12, 12)
    commit(pool, view, 8)
    release(pool, view)
    assert (classes(pool.stats()), used(pool), pool.stats().pin_count) == ({"free": 14, "warm": 2}, 2, 1)
    assert finish(pool.evict_unheld()) == 0
    assert warm(pool, span(1, 14)).pinned_tokens == 8


def test_a_filler_that_commits_nothing_leaves_no_pin() -> None:
    """What is not committed is given back at release, and an empty pin ends with an event."""
    pool = new_pool(16)
    release(pool, filler(warm(pool, span(1, 8))))
    assert (pool.stats().pin_count, used(pool), pin_ends(pool)) == (0, 0, [("w", False)])
    pool.check_invariants()


def test_a_repeated_warmup_renews_the_time_and_finds_its_sequence() -> None:
    """[G4] Name and tokens again: the same sequence for its own session, none for another, and a new end."""
    pool = new_pool(16)
    view = filler(warm(pool, span(1, 8), expires_at=5.0))
    again = warm(pool, span(1, 8), expires_at=9.0)
    assert (filler(again).number, again.missing_tokens, pool.next_deadline()) == (view.number, 8, 9.0)
    assert warm(pool, span(1, 8), session=2, expires_at=9.0).sequence is None
    assert used(pool) == 2


def test_a_pin_renewed_while_another_expires_lives_on() -> None:
    """A renewal between two slices of an expiry counts."""
    pool = new_pool(32, slice_blocks=1)
    cache(pool, span(51, 58))
    warm(pool, span(51, 58), "first", None, expires_at=1.0)
    warm(pool, span(1, 8), "second", expires_at=1.0)
    expiry = pool.expire(2.0)
    next(expiry)
    warm(pool, span(1, 8), "second", expires_at=9.0)
    finish(expiry)
    assert (pin_ends(pool), pool.next_deadline()) == ([("first", True)], 9.0)


def test_a_name_moves_to_other_tokens() -> None:
    """The old blocks are let go, blocks in both count once, and the old filler goes on as any other."""
    pool = new_pool(12)
    cache(pool, [*span(1, 4), *span(11, 14)])
    old = filler(warm(pool, [*span(1, 4), *span(21, 28)]))
    moved = warm(pool, [*span(1, 4), *span(11, 14), *span(31, 34)])
    assert (moved.pinned_tokens, moved.missing_tokens, used(pool)) == (8, 4, 3)
    commit(pool, old, 12)
    release(pool, old)
    release(pool, filler(moved))
    assert (classes(pool.stats()), used(pool)) == ({"free": 8, "cached": 2, "warm": 2}, 2)
    assert pin_ends(pool) == []


def test_a_name_moved_to_what_is_not_there_ends() -> None:
    """A pin of nothing is no pin: watchers are told, and the name is unknown."""
    pool = new_pool(12)
    cache(pool, span(1, 4))
    warm(pool, span(1, 4))
    assert warm(pool, span(51, 54), present_only=True).pinned_tokens == 0
    assert pin_ends(pool) == [("w", False)]
    with pytest.raises(PinNotFound):
        finish(pool.unwarm("t", "w"))
    assert classes(pool.stats()) == {"free": 11, "cached": 1}


def test_a_refused_move_leaves_the_pin_where_it_is() -> None:
    """[G4] Over the budget nothing changes: neither the pin nor the promise."""
    pool = new_pool(12)
    view = filler(warm(pool, span(1, 8)))
    with pytest.raises(WarmBudgetExceeded) as refused:
        warm(pool, span(51, 66))
    assert refused.value.attributes == {"needed_block_count": 4, "warm_block_count": 0, "budget_block_count": 3}
    assert used(pool) == 2
    commit(pool, view, 8)
    assert used(pool) == 2


def test_a_filler_that_loses_the_race_pins_the_canonical_block() -> None:
    """[P7] A shadow's promise goes to the block that others find."""
    pool = new_pool(12)
    view = filler(warm(pool, span(1, 4)))
    publish(pool, span(1, 4), session=2)
    assert len(commit(pool, view, 4).shadows) == 1
    release(pool, view)
    assert (used(pool), pool.stats().pin_count) == (1, 1)
    pool.check_invariants()


def test_a_filler_may_change_hands() -> None:
    """Handed off and adopted, it still pins what it commits; released by its heir, the promise ends."""
    pool = new_pool(16)
    view = filler(warm(pool, span(1, 12)))
    finish(pool.handoff(1, view.number, Commit(4), token="x", expires_at=9.0))
    assert warm(pool, span(1, 12)).sequence is None
    heir = pool.adopt(2, "x").view
    finish(pool.commit(2, heir.number, Commit(8)))
    finish(pool.release(2, heir.number))
    assert (classes(pool.stats()), used(pool)) == ({"free": 14, "warm": 2}, 2)


def test_a_filler_beyond_its_prefix_pins_no_more() -> None:
    """Tokens generated behind the pinned prefix are cached like any other's."""
    pool = new_pool(16)
    view = filler(warm(pool, span(1, 4)))
    finish(pool.extend(1, view.number, 8))
    finish(pool.commit(1, view.number, Commit(8, encode(span(5, 8)))))
    release(pool, view)
    assert classes(pool.stats()) == {"free": 14, "cached": 1, "warm": 1}


def test_a_lost_filler_keeps_its_promise_until_it_is_quiet() -> None:
    """[G3] The promise ends with the sequence; what it had committed stays pinned."""
    pool = new_pool(16)
    view = filler(warm(pool, span(1, 8)))
    commit(pool, view, 4)
    finish(pool.end_session(1))
    pool.check_invariants()
    finish(pool.session_quiet(1))
    assert (classes(pool.stats()), used(pool)) == ({"free": 15, "warm": 1}, 1)


def test_unwarm_during_the_filling_leaves_an_ordinary_sequence() -> None:
    """The pin's end takes nothing from the worker that fills it."""
    pool = new_pool(16)
    view = filler(warm(pool, span(1, 8)))
    commit(pool, view, 4)
    finish(pool.unwarm("t", "w"))
    commit(pool, view, 8)
    release(pool, view)
    assert (classes(pool.stats()), used(pool)) == ({"free": 14, "cached": 2}, 0)


def test_one_pins_end_is_not_anothers() -> None:
    """A block pinned under two names stays warm until both have ended."""
    pool = new_pool(16)
    cache(pool, span(1, 8))
    warm(pool, span(1, 8), "a")
    warm(pool, span(1, 4), "b")
    assert used(pool) == 2
    finish(pool.unwarm("t", "a"))
    assert classes(pool.stats()) == {"free": 14, "cached": 1, "warm": 1}
    finish(pool.unwarm("t", "b"))
    assert classes(pool.stats()) == {"free": 14, "cached": 2}


def test_names_are_each_tenants_own() -> None:
    """[G8] Another tenant's pin of the same name is another pin, on its own blocks."""
    pool = new_pool(16)
    cache(pool, span(1, 4))
    warm(pool, span(1, 4))
    with pytest.raises(PinNotFound):
        finish(pool.unwarm("u", "w"))
    assert finish(pool.warmup("u", None, prompt(span(1, 4)), "w")).pinned_tokens == 0
    assert present(pool, span(1, 4)) == 4
    assert pool.stats().pin_count == 1


def test_a_warmed_prefix_survives_pressure() -> None:
    """[G3] Pinned blocks are never room for others."""
    pool = new_pool(4, warm_budget_ratio=0.5)
    cache(pool, span(1, 16))
    warm(pool, span(1, 8), present_only=True)
    allocate(pool, span(51, 58))
    assert present(pool, span(1, 16)) == 8


def test_pins_are_told_of_by_tenant_the_oldest_first_and_no_more_than_asked_for() -> None:
    """A pin that was moved is as old as its move. What a filler has left out is missing, and nobody fills it."""
    pool = new_pool(64)
    cache(pool, span(1, 4))
    warm(pool, span(1, 4), "first", expires_at=9.0)
    view = filler(warm(pool, span(1, 12), "second"))
    finish(pool.warmup("u", None, prompt(span(1, 8)), "theirs", expires_at=None))
    assert pool.pins("u", 8) == ()  # nothing of it is there in its namespace: no pin
    commit(pool, view, 8)
    first = PinStats("t", "first", 4, 0, filling=False, expires_at=9.0)
    assert pool.pins("t", 8) == (first, PinStats("t", "second", 8, 4, filling=True, expires_at=None))
    release(pool, view)
    warm(pool, span(1, 4), "first")
    left = PinStats("t", "second", 8, 4, filling=False, expires_at=None)
    moved = PinStats("t", "first", 4, 0, filling=False, expires_at=None)
    assert pool.pins(None, 8) == (left, moved)
    assert pool.pins(None, 1) == (left,)
    pool.open_session(2, "u")
    finish(pool.warmup("u", 2, prompt(span(1, 8)), "theirs", expires_at=None))
    assert [pin.name for pin in pool.pins("u", 8)] == ["theirs"]
    assert [pin.name for pin in pool.pins("t", 8)] == ["second", "first"]
    assert [pin.name for pin in pool.pins(None, 8)] == ["second", "first", "theirs"]
