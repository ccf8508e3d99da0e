"""Retired versions: what nobody holds is free, now or as soon as it is let go of. Rules [V1] to [V5]."""

import pytest
from calls import classes, commit, encode, new_pool, release, span
from retirements import cache, named, present, publish, retire

from kvharbor.pool import Commit, MissKind
from kvharbor.pool.events import BlocksRemoved, PinEnded
from kvharbor.pool.state import State
from kvharbor.pool.steps import finish


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
