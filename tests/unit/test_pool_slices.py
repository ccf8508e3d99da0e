"""Between two slices anything of another session may happen: the cases that take some arranging."""

from typing import TypeVar

import pytest
from calls import allocate, cache, classes, commit, encode, new_pool, present, prompt, release, span

from kvharbor.pool import Commit, ExtraKey, MissKind, Pool, Presence
from kvharbor.pool.errors import PoolExhausted
from kvharbor.pool.steps import Steps, finish

T = TypeVar("T")


def slices(pool: Pool, steps: Steps[object]) -> int:
    """Runs an operation to its end and counts its slices, with the invariants checked between them."""
    return counted(pool, steps)[0]


def counted(pool: Pool, steps: Steps[T]) -> tuple[int, T]:
    count = 1
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            pool.check_invariants()
            return count, stop.value
        pool.check_invariants()
        count += 1


def test_a_short_call_is_one_slice() -> None:
    """Nothing yields for a prompt below slice_blocks."""
    pool = new_pool(64, slice_blocks=8)
    cache(pool, span(1, 16))
    assert slices(pool, pool.allocate(1, prompt(span(1, 28)))) == 1
    assert slices(pool, pool.commit(1, 2, Commit(28))) == 1
    count, made = counted(pool, pool.fork(1, 2, 1))
    assert count == 1
    pool.finish_fork(made)
    assert slices(pool, pool.lookup("t", prompt(span(1, 28)))) == 1
    assert slices(pool, pool.release(1, 2)) == 1


def test_every_long_call_is_cut() -> None:
    """Match, fill, commit, fork, eviction and release of 32 blocks take slices of 4."""
    pool = new_pool(128, slice_blocks=4)
    tokens = span(1, 128)
    assert slices(pool, pool.allocate(1, prompt(tokens))) == 8
    assert slices(pool, pool.commit(1, 1, Commit(128))) == 8
    count, made = counted(pool, pool.fork(1, 1, 2))
    assert count >= 16
    pool.finish_fork(made)
    assert slices(pool, pool.lookup("t", prompt(tokens))) == 8
    assert slices(pool, pool.release(1, 1)) == 8
    assert slices(pool, pool.allocate(2, prompt(tokens))) >= 8
    assert slices(pool, pool.session_quiet(2)) == 8


def test_a_caller_may_leave_during_the_match() -> None:
    """[G4] Closed between two slices of its match, an Allocate leaves nothing held."""
    pool = new_pool(16, slice_blocks=1)
    cache(pool, span(1, 16))
    before = classes(pool.stats())
    steps = pool.allocate(1, prompt(span(1, 20)))
    next(steps)
    next(steps)
    assert classes(pool.stats()) == {"free": 12, "active": 2, "cached": 2}
    steps.close()
    assert (classes(pool.stats()), pool.stats().sequence_count) == (before, 0)
    pool.check_invariants()


def test_room_that_is_claimed_is_nobody_elses() -> None:
    """[G5] From admission on, what an Allocate has still to take is neither available nor revivable."""
    pool = new_pool(4, slice_blocks=1)
    cache(pool, span(1, 16))
    filling = pool.allocate(1, prompt(span(51, 66)))
    next(filling)
    assert pool.available_block_count == 0
    assert present(pool, span(1, 16)) == 12
    with pytest.raises(PoolExhausted) as refused:
        allocate(pool, span(1, 5), session=2)
    assert refused.value.attributes["available_block_count"] == 0
    view = finish(filling)
    assert (len(view.block_ids), present(pool, span(1, 16))) == (4, 0)


def test_a_refusal_counts_what_the_match_would_take() -> None:
    """The need in the refusal is what must be available before another try can succeed."""
    pool = new_pool(10)
    cache(pool, span(1, 24))
    allocate(pool, span(51, 58))
    with pytest.raises(PoolExhausted) as refused:
        allocate(pool, [*span(1, 24), *span(61, 72)], session=2)
    named = refused.value.attributes
    assert (named["needed_block_count"], named["available_block_count"]) == (9, 8)


def test_publication_waits_when_all_room_is_claimed() -> None:
    """[P7] A canonical block that cannot be revived now is found by the next commit, extra keys and all."""
    pool = new_pool(6, slice_blocks=1)
    key = ExtraKey(1, b"image")
    late = finish(pool.allocate(1, prompt(span(1, 8), [key])))
    first = finish(pool.allocate(2, prompt(span(1, 8), [key])))
    finish(pool.commit(2, first.number, Commit(8)))
    release(pool, first)
    filling = pool.allocate(2, prompt(span(51, 66)))
    next(filling)
    assert pool.available_block_count == 0
    done = finish(pool.commit(1, late.number, Commit(8)))
    assert (done.committed_tokens, done.shadows) == (0, ())
    pool.check_invariants()
    filled = finish(filling)
    release(pool, filled)
    done = finish(pool.commit(1, late.number, Commit(8)))
    assert done.committed_tokens == 8
    found = finish(pool.lookup("t", prompt(span(1, 8), [key])))
    assert (found.present_tokens, present(pool, span(1, 8))) == (8, 0)
    pool.check_invariants()


def test_a_deferred_sequence_can_fork_and_change_hands() -> None:
    """Written blocks that are still to be published are copied like a tail, and travel like one."""
    pool = new_pool(8, slice_blocks=1)
    late = allocate(pool, span(1, 4))
    cache(pool, span(1, 4), session=2)
    filling = pool.allocate(2, prompt(span(51, 78)))
    next(filling)
    assert commit(pool, late, 4).committed_tokens == 0
    finish(filling)
    finish(pool.release(2, 2))
    made = finish(pool.fork(1, late.number, 1))
    assert len(made.copies) == 1
    (child,) = pool.finish_fork(made)
    finish(pool.handoff(1, child.number, Commit(4), token="x", expires_at=1.0))
    assert pool.adopt(2, "x").view.computed_tokens == 4
    assert (present(pool, span(1, 4)), commit(pool, late, 4).committed_tokens) == (4, 4)
    pool.check_invariants()


def test_a_lookup_stops_where_its_chain_was_cut() -> None:
    """Nothing is held, so what lies behind an evicted block is not told, but that it was evicted."""
    pool = new_pool(8, slice_blocks=1, history=True)
    cache(pool, span(1, 16))
    looking = pool.lookup("t", prompt(span(1, 16)))
    next(looking)
    next(looking)
    finish(pool.evict_unheld())
    cache(pool, span(1, 16))
    with pytest.raises(StopIteration) as ended:
        next(looking)
    presence = ended.value.value
    assert presence == Presence(8, 8, presence.miss)
    assert presence.miss.kind is MissKind.EVICTED


def test_an_eviction_spares_what_is_held_or_grows_meanwhile() -> None:
    """[G3] Between its slices a block of the subtree is held again, with all above it: those stay."""
    pool = new_pool(8, slice_blocks=1)
    view = cache(pool, span(1, 16))
    evicting = pool.evict_block(view.block_ids[0], view.generations[0])
    next(evicting)
    held = allocate(pool, span(1, 9), session=2)
    assert (held.cached_tokens, finish(evicting)) == (8, 2)
    assert present(pool, span(1, 16)) == 8
    pool.check_invariants()


def test_a_block_that_was_freed_and_filled_again_is_spared() -> None:
    """[P3] The eviction knows its blocks by generation, so other content in the same block stays."""
    pool = new_pool(3, slice_blocks=1)
    view = cache(pool, span(1, 12))
    evicting = pool.evict_block(view.block_ids[0], view.generations[0])
    next(evicting)
    finish(pool.evict_unheld())
    others = [span(first, first + 3) for first in (51, 61, 71)]
    assert {cache(pool, tokens).block_ids[0] for tokens in others} == set(view.block_ids)
    assert finish(evicting) == 1
    assert [present(pool, tokens) for tokens in others] == [4, 4, 4]


def test_a_block_that_has_got_a_child_is_spared() -> None:
    """[P2] What was published below a block between two slices of its eviction keeps its parent."""
    pool = new_pool(4, slice_blocks=1)
    view = cache(pool, span(1, 8))
    evicting = pool.evict_block(view.block_ids[0], view.generations[0])
    next(evicting)
    grown = [*span(1, 4), *span(51, 54)]
    cache(pool, grown)
    assert finish(evicting) == 1
    assert present(pool, grown) == 8
    pool.check_invariants()


def test_a_namespace_outlives_its_last_block_while_a_match_uses_it() -> None:
    """[G1] A sequence that began before the eviction of all else publishes into the same namespace."""
    pool = new_pool(8, slice_blocks=1)
    cache(pool, span(1, 4))
    matching = pool.allocate(1, prompt([9, *span(2, 12)]))
    next(matching)
    finish(pool.evict_unheld())
    view = finish(matching)
    commit(pool, view, 12)
    assert present(pool, [9, *span(2, 12)]) == 12
    release(pool, view)
    finish(pool.evict_unheld())
    assert len(pool._state.namespaces) == 0


def test_a_commit_in_slices_publishes_what_came_before() -> None:
    """[P1] After each slice exactly the blocks published so far are hits for others."""
    pool = new_pool(8, slice_blocks=1)
    view = allocate(pool, span(1, 12))
    steps = pool.commit(1, view.number, Commit(12))
    next(steps)
    assert present(pool, span(1, 12)) == 4
    next(steps)
    assert allocate(pool, span(1, 12), session=2).cached_tokens == 8
    assert finish(steps).committed_tokens == 12


def test_a_retry_with_new_tokens_after_growth_is_cheap() -> None:
    """[G9] Extend answers with what it added, however long the table is."""
    pool = new_pool(5_000, 1)
    view = allocate(pool, span(1, 4_000))
    added = finish(pool.extend(1, view.number, 4_001))
    assert (len(added.block_ids), len(added.generations), added.capacity_tokens) == (1, 1, 4_001)
    assert finish(pool.extend(1, view.number, 10)).capacity_tokens == 4_001
    finish(pool.commit(1, view.number, Commit(1, encode([7]))))
