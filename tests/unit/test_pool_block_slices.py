"""Block calls of many blocks run in slices, between which every rule holds and others are served."""

from collections.abc import Callable
from typing import Any

import pytest
from block_calls import NONE, acquire, backwards, commit, invalidate, keys, lease, part, publish, release, tokens
from calls import allocate, classes, new_pool, span

from kvharbor.pool import Commit, Pending, Pool
from kvharbor.pool.errors import BlockNotHeld, InvalidField
from kvharbor.pool.invalidation import MAX_SUBTREE
from kvharbor.pool.steps import Steps, finish

SLICE = 8
NAMES = range(5 * SLICE)


def sliced(pool: Pool, steps: Steps[Any], meanwhile: Callable[[], object] = lambda: None) -> tuple[Any, int]:
    """Runs an operation, checks every rule between two slices, and returns its result and how many there were."""
    count = 1
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            pool.check_invariants()
            return stop.value, count
        count += 1
        pool.check_invariants()
        meanwhile()


def new() -> Pool:
    return new_pool(64, slice_blocks=SLICE)


def test_a_long_commit_is_published_slice_by_slice() -> None:
    """[B3] What a slice has published is held and found, and others may do with it what they like meanwhile."""
    pool = new()
    own = lease(pool, 40)
    found: list[int] = []

    def meanwhile() -> None:
        held = acquire(pool, keys(NAMES), session=2).held
        found.append(len(held))
        release(pool, held, session=2)

    shadows, count = sliced(pool, pool.commit_blocks(1, NONE, own, keys(NAMES)), meanwhile)
    assert shadows == ()
    assert found[-4:] == [8, 16, 24, 32]
    assert count >= 5
    repeated, count = sliced(pool, pool.commit_blocks(1, NONE, own, keys(NAMES)))
    assert (repeated, count) == ((), 6)


def test_a_long_commit_is_all_or_nothing_in_its_checks() -> None:
    """[G4] A block at its end that is not leased is found before the first is published."""
    pool = new()
    own = lease(pool, 40)
    release(pool, part(own, 39))
    before = pool.stats()
    with pytest.raises(BlockNotHeld):
        finish(pool.commit_blocks(1, NONE, own, keys(NAMES)))
    assert pool.stats() == before


def test_a_long_match_is_taken_over_slice_by_slice() -> None:
    """[B2] It is held all the while: by the call, then by the session too, then by the session alone."""
    pool = new()
    own = publish(pool, keys(NAMES), 40)
    release(pool, backwards(own))
    marked = keys([*NAMES, "next"])

    def meanwhile() -> None:
        if pool.holding(2).held_block_count:
            assert finish(pool.evict_unheld()) == 0

    found, count = sliced(pool, pool.acquire(2, marked, 50, computes=True), meanwhile)
    assert (found.held, len(found.leased)) == (own, 10)
    assert count > 10
    assert classes(pool.stats()) == {"free": 14, "reserved": 10, "active": 40}
    assert pool.stats().shared_block_count == 0
    pending = acquire(pool, marked).pending
    assert pending is not None
    assert pending.session == 2


def test_a_long_chain_that_stands_back_gives_its_match_back_in_slices() -> None:
    """[W8] Also where its caller goes away in the midst of it."""
    pool = new()
    own = publish(pool, keys(NAMES), 40)
    release(pool, backwards(own))
    computing = acquire(pool, keys([*NAMES, "next"]), 41, computes=True)
    marked, before = keys([*NAMES, "next", "more"]), (classes(pool.stats()), pool.stats().counters)
    found, count = sliced(pool, pool.acquire(2, marked, 42, computes=True, unless_pending=True))
    assert (len(found.held), len(found.leased), found.stands_back) == (0, 0, True)
    assert found.pending == Pending(4, 1, 0.0)
    assert count > 8
    assert (classes(pool.stats()), pool.stats().counters) == before
    for gone_after in range(1, count):
        steps = pool.acquire(2, marked, 42, unless_pending=True)
        for _ in range(gone_after):
            next(steps)
        steps.close()
        pool.check_invariants()
        assert (classes(pool.stats()), pool.stats().counters) == before
    release(pool, backwards(computing.held))
    assert len(acquire(pool, marked, 42, session=2, unless_pending=True).leased) == 2


def test_a_chain_that_lingers_goes_in_slices() -> None:
    """[B2]"""
    pool = new()
    own = publish(pool, keys(NAMES), 40)
    released, count = sliced(pool, pool.release_blocks(1, part(own, 0, 39)))
    assert (released, count) == (39, 5)
    assert classes(pool.stats()) == {"free": 24, "active": 40}
    released, count = sliced(pool, pool.release_blocks(1, part(own, 39)))
    assert (released, count) == (1, 5)
    assert list(pool._state.blocks.evictable) == list(own.block_ids[::-1])


def test_a_lost_session_is_emptied_in_slices() -> None:
    pool = new()
    publish(pool, keys(NAMES), 40)
    lease(pool, 20)
    assert sliced(pool, pool.end_session(1))[1] > 2
    assert sliced(pool, pool.writers_quiet(1))[1] > 2
    assert sliced(pool, pool.session_quiet(1))[1] > 5
    assert classes(pool.stats()) == {"free": 24, "cached": 40}


def test_a_session_is_not_forgotten_while_it_holds_blocks() -> None:
    """[G3] A copy that ends meanwhile finds its sequences gone, and its own blocks still there."""
    pool = new()
    publish(pool, keys(NAMES), 40)
    view = allocate(pool, span(1, 2))
    finish(pool.commit(1, view.number, Commit(2)))
    made = finish(pool.fork(1, view.number, 1))
    ending = pool.session_quiet(1)
    next(ending)
    pool.abort_fork(made)
    pool.check_invariants()
    assert sliced(pool, ending)[1] > 2
    assert pool.usage().session_count == 2
    assert classes(pool.stats()) == {"free": 24, "cached": 40}


def test_what_others_commit_meanwhile_makes_a_shadow() -> None:
    """[P7] A chain that another session publishes between two slices is found where the commit has come to."""
    pool = new()
    own, theirs = lease(pool, 24), lease(pool, 24, session=2)
    done: list[object] = []

    def meanwhile() -> None:
        if not done:
            done.append(commit(pool, theirs, keys(range(24)), session=2))

    shadows, _ = sliced(pool, pool.commit_blocks(1, NONE, own, keys(range(24))), meanwhile)
    assert len(shadows) + len(done[0]) == 24  # type: ignore[arg-type]
    assert {one.position for one in shadows} <= set(range(24))


def test_a_commit_makes_way_where_all_room_is_claimed() -> None:
    """[B3] A cached twin that cannot be revived is evicted, as it would be anyway; the own block takes its place."""
    pool = new_pool(32, slice_blocks=SLICE)
    release(pool, backwards(publish(pool, keys(range(2, 20)), 18)))
    own = lease(pool, 3, session=2)
    under_way = pool.lease(1, 29, 29)
    next(under_way)
    assert pool.available_block_count == 0
    shadows, count = sliced(pool, pool.commit_blocks(2, NONE, own, keys([2, 3, "x"])))
    assert shadows == ()
    assert count > 2
    assert len(finish(under_way)) == 29
    assert acquire(pool, keys([2, 3, 4]), session=2).held == part(own, 0, 2)
    pool.check_invariants()


def test_what_leaves_the_index_in_one_step_is_bounded() -> None:
    """[S14], [B4] From the end of a chain all of it can be invalidated; one refusal has changed nothing."""
    pool = new_pool(MAX_SUBTREE + 8)
    blocks = publish(pool, tokens(range(4 * (MAX_SUBTREE + 2))), MAX_SUBTREE + 2)
    for place in (0, 1):
        with pytest.raises(InvalidField):
            invalidate(pool, part(blocks, place, place + 1))
    assert pool.stats().active_block_count == MAX_SUBTREE + 2
    steps = pool.invalidate(1, blocks.block_ids[2], blocks.generations[2])
    next(steps)  # others are served before another one of the batch
    assert len(finish(steps).leased) == MAX_SUBTREE
    assert len(invalidate(pool, part(blocks, 0, 1)).leased) == 2
    pool.check_invariants()
