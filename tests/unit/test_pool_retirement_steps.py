"""A retirement in slices, and over the end of the process: others go on, nothing is forgotten. Rules [V1] to [V5]."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from calls import classes, commit, new_pool, release, span
from restarts import Restarts, held
from retirements import cache, named, publish, retire

from kvharbor.pool import Pool, SequenceView
from kvharbor.pool.steps import finish


def bushy(pool: Pool, version: str = "v1") -> list[SequenceView]:
    """40 chains that share a prefix, some still held, some only their beginning, and 24 namespaces of one block."""
    kept = []
    for number in range(40):
        if number % 4 == 1:
            kept.append(publish(pool, named([*span(1, 8), *[100 + number] * 4], version)))
        view = publish(pool, named([*span(1, 8), *[100 + number] * 4, *span(1, 4 * (number % 5))], version))
        if number % 4:
            release(pool, view)
        else:
            kept.append(view)
    for number in range(24):
        cache(pool, named(span(1, 4), version, salt=number.to_bytes(1, "little")))
    return kept


def test_a_retirement_is_cut_in_slices() -> None:
    """[G9] Whatever the tree looks like; in the end only what is held is left."""
    pool = new_pool(400, slice_blocks=4)
    kept = bushy(pool)
    blocks = pool._state.tree.block_count
    assert retire(pool) > blocks // 4
    assert classes(pool.stats()).keys() == {"active", "free"}
    for view in kept:
        release(pool, view)
        pool.check_invariants()
    assert classes(pool.stats()) == {"free": 400}


def evict_something(pool: Pool, chance: random.Random) -> None:
    if cached := list(pool._state.blocks.evictable):
        block = chance.choice(cached)
        finish(pool.evict_block(block, pool._state.blocks.generation[block]))


def release_something(pool: Pool, chance: random.Random) -> None:
    if numbers := list(pool._state.sessions[1].sequences):
        finish(pool.release(1, chance.choice(numbers)))


def compute_something(pool: Pool, chance: random.Random) -> None:
    """A sequence that was there before publishes more, and ends when it is complete."""
    if sequences := list(pool._state.sessions[2].sequences.values()):
        view = pool._state.view(chance.choice(sequences))
        commit(pool, view, min(view.computed_tokens + 4, view.token_count))
        if view.computed_tokens == view.token_count:
            release(pool, view)


@pytest.mark.parametrize("interfere", [evict_something, release_something, compute_something])
@pytest.mark.parametrize("seed", range(6))
def test_others_go_on_between_its_slices(interfere: Callable[[Pool, random.Random], None], seed: int) -> None:
    """[V1] Whatever they take from under it or put before it, nothing stays cached."""
    pool, chance = new_pool(400, slice_blocks=3), random.Random(seed)
    kept = bushy(pool)
    for number in range(6):
        finish(pool.allocate(2, named([*span(1, 8), *[300 + number] * 4, *span(1, 12)])))
    for _ in pool.retire_version("t", "v1"):
        pool.check_invariants()
        interfere(pool, chance)
        pool.check_invariants()
    pool.check_invariants()
    assert "cached" not in classes(pool.stats())
    for view in kept:
        if view.number in pool._state.sessions[1].sequences:
            release(pool, view)
    finish(pool.session_quiet(2))
    pool.check_invariants()
    assert classes(pool.stats()) == {"free": 400}


def test_a_use_stops_a_retirement_under_way() -> None:
    """[V2] What it has not come to stays; another retirement meanwhile takes it all."""
    pool = new_pool(400, slice_blocks=3)
    bushy(pool)
    first = pool.retire_version("t", "v1")
    for _ in range(12):
        next(first)
    release(pool, publish(pool, named(span(1, 8)), session=2))
    second = pool.retire_version("t", "v1")
    next(second)
    for _ in first:
        pool.check_invariants()
    pool.check_invariants()
    for _ in second:
        pool.check_invariants()
    pool.check_invariants()
    assert classes(pool.stats()).keys() == {"active", "free"}


def test_it_outlives_the_process() -> None:
    """[V4] What the next one finds unheld is free, what a session resumes goes with its release."""
    process = Restarts(32, slice_blocks=2)
    view = publish(process.pool, named(span(1, 8)))
    cache(process.pool, named([*span(1, 4), *span(11, 30)]))
    next(process.pool.retire_version("t", "v1"))
    assert classes(process.pool.stats())["cached"] == 5
    pool = process.restart()
    assert classes(pool.stats()) == {"active": 2, "free": 30}
    process.resume(1, replace(held(view, span(1, 8), computed=8, committed=8), version="v1"))
    process.finish_resume(1, 2, 3)
    assert classes(pool.stats()) == {"active": 2, "free": 30}
    finish(pool.release(1, view.number))
    pool.check_invariants()
    assert classes(pool.stats()) == {"free": 32}
    cache(pool, named(span(1, 8)))
    assert classes(process.restart().stats()) == {"cached": 2, "free": 30}


def test_what_nobody_resumes_goes_with_the_recovery() -> None:
    """[V4] [L3] Its holds end when every session has resumed or is gone."""
    process = Restarts(16)
    publish(process.pool, named(span(1, 8)))
    publish(process.pool, named(span(1, 8), "v2"))
    cache(process.pool, named(span(1, 12), "v2"))
    retire(process.pool)
    pool = process.restart()
    assert classes(pool.stats()) == {"active": 4, "cached": 1, "free": 11}
    process.finish_resume(1, 2, 3)
    assert classes(pool.stats()) == {"cached": 3, "free": 13}


def test_a_retirement_cut_short_ends_its_pins_with_the_process() -> None:
    """[V3] A pin of a version that is being retired is not there any more."""
    process = Restarts(32, slice_blocks=1, warm_budget_ratio=1.0)
    cache(process.pool, named(span(1, 8)))
    finish(process.pool.warmup("t", None, named(span(1, 8)), "x"))
    next(process.pool.retire_version("t", "v1"))
    assert process.pool.pin("t", "x") is not None
    pool = process.restart({})
    assert pool.pin("t", "x") is None
    assert classes(pool.stats()) == {"free": 32}
