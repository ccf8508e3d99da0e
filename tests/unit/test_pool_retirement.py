"""Retired versions: what nobody holds is free, now or as soon as it is let go of. Rules [V1] to [V5]."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from calls import classes, commit, encode, new_pool, release, span
from restarts import Restarts, held

from kvharbor.pool import Commit, MissKind, Pool, Prompt, SequenceView
from kvharbor.pool.events import BlocksRemoved, PinEnded
from kvharbor.pool.state import State
from kvharbor.pool.steps import finish


def named(tokens: list[int], version: str = "v1", adapter: str = "", salt: bytes = b"") -> Prompt:
    return Prompt(encode(tokens), version=version, adapter=adapter, salt=salt)


def publish(pool: Pool, prompt: Prompt, session: int = 1) -> SequenceView:
    """Allocates and commits a prompt, and holds it."""
    view = finish(pool.allocate(session, prompt))
    commit(pool, view, view.token_count)
    return view


def cache(pool: Pool, prompt: Prompt, session: int = 1) -> None:
    """Leaves a prompt in the cache, held by nobody."""
    release(pool, publish(pool, prompt, session))


def present(pool: Pool, prompt: Prompt, tenant: str = "t") -> int:
    return finish(pool.lookup(tenant, prompt)).present_tokens


def retire(pool: Pool, version: str = "v1", tenant: str = "t") -> int:
    """Retires a version with every rule checked after each slice; returns how many slices there were."""
    count = 1
    for _ in pool.retire_version(tenant, version):
        pool.check_invariants()
        count += 1
    pool.check_invariants()
    assert not any(namespace.sweep_count for namespace in pool._state.namespaces)
    return count


def test_what_is_cached_is_free_at_once() -> None:
    """[V1] Every adapter and salt of that tenant's version, and nothing else; watchers hear of it."""
    pool = new_pool(32, history=True)
    for prompt in (named(span(1, 8)), named(span(1, 4), adapter="lora"), named(span(1, 4), salt=b"s")):
        cache(pool, prompt)
    cache(pool, named(span(1, 4), "v2"))
    cache(pool, named(span(1, 4), "v1"), session=3)
    pool.drain_events()
    retire(pool)
    assert classes(pool.stats()) == {"cached": 2, "free": 30}
    assert present(pool, named(span(1, 8))) == 0
    assert (present(pool, named(span(1, 4), "v2")), present(pool, named(span(1, 4)), "u")) == (4, 4)
    removed = [event for event in pool.drain_events() if isinstance(event, BlocksRemoved)]
    assert {event.tenant for event in removed} == {"t"}
    assert sum(len(event.digests) for event in removed) == 4
    retire(pool, "v3")
    assert classes(pool.stats()) == {"cached": 2, "free": 30}


def test_what_is_held_goes_with_its_last_holder() -> None:
    """[V1] It is never cached again, whoever shares it, and what is committed later neither."""
    pool = new_pool(32)
    cache(pool, named([*span(1, 4), *span(9, 12)]))
    one, two = publish(pool, named(span(1, 8))), publish(pool, named(span(1, 8)), session=2)
    retire(pool)
    assert classes(pool.stats())["active"] == 3  # a prefix of one block, a block and its shadow
    release(pool, one)
    pool.check_invariants()
    assert present(pool, named(span(1, 8))) == 8
    release(pool, two)
    pool.check_invariants()
    assert classes(pool.stats()) == {"free": 32}
    assert len(pool._state.namespaces) == pool._state.namespaces.retired_count == 0


def test_what_runs_keeps_its_namespace() -> None:
    """A sequence goes on committing and forking in it, is handed over and adopted, and all of it goes in the end."""
    pool = new_pool(32)
    view = finish(pool.allocate(1, named(span(1, 4)), reserve_tokens=16))
    retire(pool)
    commit(pool, view, 4)
    made = finish(pool.fork(1, view.number, 1))
    pool.finish_fork(made)
    finish(pool.handoff(1, view.number, Commit(8, encode(span(5, 8))), token="x", expires_at=9.0))
    view = pool.adopt(2, "x").view
    assert view.computed_tokens == 8
    pool.check_invariants()
    release(pool, view)
    pool.check_invariants()
    assert classes(pool.stats()) == {"active": 1, "free": 31}
    finish(pool.release(1, made.children[0]))
    pool.check_invariants()
    assert classes(pool.stats()) == {"free": 32}


def test_a_lost_session_gives_back_what_it_read() -> None:
    """[G3] Its read holds stay until it is quiet, and then nothing of them does."""
    pool = new_pool(8)
    publish(pool, named(span(1, 6)))
    retire(pool)
    finish(pool.end_session(1))
    finish(pool.writers_quiet(1))
    pool.check_invariants()
    assert classes(pool.stats()) == {"active": 1, "free": 7}
    finish(pool.session_quiet(1))
    pool.check_invariants()
    assert classes(pool.stats()) == {"free": 8}


def test_the_pins_of_a_version_end_with_it() -> None:
    """[V3] Full ones and those that are being filled, each with its event; the sequence that fills one goes on."""
    pool = new_pool(32, warm_budget_ratio=1.0)
    cache(pool, named(span(1, 8)))
    cache(pool, named(span(1, 8), "v2"))
    for name, version in (("full", "v1"), ("other", "v2")):
        finish(pool.warmup("t", None, named(span(1, 8), version), name))
    filling = finish(pool.warmup("t", 1, named(span(1, 12)), "filling")).sequence
    assert filling is not None
    pool.drain_events()
    retire(pool)
    ended = [event for event in pool.drain_events() if isinstance(event, PinEnded)]
    assert {(event.tenant, event.name, event.expired) for event in ended} == {
        ("t", "full", False),
        ("t", "filling", False),
    }
    assert pool.stats().warm_budget_used_block_count == 2
    assert pool.pin("t", "other") is not None
    commit(pool, filling, 12)
    release(pool, filling)
    pool.check_invariants()
    assert classes(pool.stats()) == {"warm": 2, "free": 30}


@pytest.mark.parametrize("use", ["allocate", "warmup"])
def test_a_later_use_makes_an_ordinary_namespace(use: str) -> None:
    """[V2] Who names it anew, be it refused afterwards, finds what is held of it, and it is cached again."""
    pool = new_pool(8)
    view = publish(pool, named(span(1, 8)))
    retire(pool)
    assert present(pool, named(span(1, 8))) == 8
    if use == "allocate":
        release(pool, publish(pool, named(span(1, 8)), session=2))
    else:
        finish(pool.warmup("t", None, named(span(1, 8)), "x"))
    pool.check_invariants()
    release(pool, view)
    pool.check_invariants()
    assert classes(pool.stats()) == {"cached" if use == "allocate" else "warm": 2, "free": 6}


def test_looking_is_no_use() -> None:
    """[V2] Lookup and adopting leave a retired namespace as it is."""
    pool = new_pool(8)
    view = publish(pool, named(span(1, 8)))
    finish(pool.handoff(1, view.number, Commit(8), token="x", expires_at=9.0))
    retire(pool)
    assert present(pool, named(span(1, 8))) == 8
    release(pool, pool.adopt(2, "x").view)
    assert classes(pool.stats()) == {"free": 8}


def test_a_pin_made_meanwhile_is_a_later_use() -> None:
    """[V2] A Warmup whose match was under way keeps its version: nobody else would end its pin."""
    pool = new_pool(32, slice_blocks=2, warm_budget_ratio=1.0)
    cache(pool, named(span(1, 16)))
    warming = pool.warmup("t", None, named(span(1, 16)), "x")
    next(warming)
    retire(pool)
    assert finish(warming).pinned_tokens == 8
    pool.check_invariants()
    finish(pool.unwarm("t", "x"))
    assert classes(pool.stats()) == {"cached": 2, "free": 30}


def test_a_pin_that_is_ending_meanwhile_leaves_nothing() -> None:
    """[V1] Its blocks are let go of behind the retirement's back, in slices of their own."""
    pool = new_pool(32, slice_blocks=2, warm_budget_ratio=1.0)
    cache(pool, named(span(1, 16)))
    finish(pool.warmup("t", None, named(span(1, 16)), "x"))
    ending = pool.unwarm("t", "x")
    next(ending)
    retire(pool)
    assert classes(pool.stats()) == {"warm": 2, "free": 30}
    finish(ending)
    pool.check_invariants()
    assert classes(pool.stats()) == {"free": 32}


def test_a_match_that_is_too_short_to_be_used_leaves_nothing() -> None:
    """[V1] What an Allocate has held of it in slices goes too."""
    pool = new_pool(32, slice_blocks=1, min_reuse_tokens=16)
    cache(pool, named(span(1, 12)))
    allocating = pool.allocate(1, named(span(1, 24)))
    next(allocating)
    retire(pool)
    assert finish(allocating).cached_tokens == 0
    pool.check_invariants()
    assert classes(pool.stats()) == {"reserved": 6, "free": 26}


def test_it_is_no_eviction_but_known_as_one() -> None:
    """[V5] [Y3] Nothing is counted that would speak for a larger pool; a miss tells that an administrator did it."""
    pool = new_pool(32, history=True)
    pool.tell_time(1.0)
    cache(pool, named(span(1, 8)))
    retire(pool)
    pool.tell_time(3.0)
    miss = finish(pool.lookup("t", named(span(1, 8)))).miss
    assert miss is not None
    assert (miss.kind, miss.evicted_s, miss.evicted_by) == (MissKind.EVICTED, 2.0, 0)
    cache(pool, named(span(1, 8)))
    stats = pool.stats()
    assert stats.counters.evicted_block_count == stats.traffic.recomputed_block_count == 0
    assert stats.traffic.residences.sum_s == stats.traffic.reuse_gaps.sum_s == 0.0


def test_a_release_elsewhere_costs_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """[G9] While a retired namespace is held, a sequence of another one is released as ever: one comparison."""
    pool = new_pool(32)
    publish(pool, named(span(1, 8)))
    retire(pool)
    view = publish(pool, named(span(1, 8), "v2"))
    monkeypatch.setattr(State, "free_retired", None)
    release(pool, view)
    pool.check_invariants()


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
