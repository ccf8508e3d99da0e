"""Recovery: what is there after the process was replaced, who holds it, and until when."""

import time

import pytest
from calls import allocate, cache, classes, commit, present, prompt, publish, release, span
from restarts import SESSIONS, Restarts, held

from kvharbor.pool import Commit, ExtraKey
from kvharbor.pool.digest import DIGEST_BYTES
from kvharbor.pool.errors import PoolExhausted, StaleGeneration
from kvharbor.pool.steps import finish


def test_what_was_committed_is_a_hit_again() -> None:
    """[G7] Chains, namespaces and extra keys are all back, for their own tenant alone."""
    process = Restarts(32)
    cache(process.pool, span(1, 12))
    cache(process.pool, [*span(1, 8), 77, 78, 79, 80])
    cache(process.pool, span(1, 12), salt=b"s")
    cache(process.pool, span(1, 4), session=3)
    keyed = prompt(span(1, 8), [ExtraKey(1, b"image" * 40), ExtraKey(6, b"other")])
    view = finish(process.pool.allocate(1, keyed))
    finish(process.pool.commit(1, view.number, Commit(8)))
    release(process.pool, view)
    before = process.pool.stats()
    pool = process.restart({})
    assert classes(pool.stats()) == classes(before)
    assert [(one.tenant, one.committed_block_count) for one in pool.stats().tenants] == [("t", 9), ("u", 1)]
    assert (present(pool, span(1, 12)), present(pool, [*span(1, 8), 77, 78, 79, 80])) == (12, 12)
    assert (present(pool, span(1, 12), salt=b"s"), present(pool, span(1, 8), "u")) == (12, 4)
    assert finish(pool.lookup("t", keyed)).present_tokens == 8
    assert finish(pool.lookup("t", prompt(span(1, 8), [ExtraKey(1, b"image")]))).present_tokens == 0


def test_recency_outlives_the_process() -> None:
    """[L3] Blocks go in the order of their release before the restart, children before parents."""
    process = Restarts(4)
    for first in (10, 20):
        cache(process.pool, span(first, first + 7))
    allocate(process.pool, span(10, 17), most=8)
    finish(process.pool.session_quiet(1))
    pool = process.restart({})
    pool.open_session(9, "t")
    allocate(pool, [1], session=9)
    assert (present(pool, span(10, 17)), present(pool, span(20, 27))) == (8, 4)
    allocate(pool, [2] * 5, session=9)
    assert (present(pool, span(10, 17)), present(pool, span(20, 27))) == (4, 0)


def test_reserved_blocks_of_nobody_are_free_one_generation_later() -> None:
    """[L1] [L6] A session that is not known any more has nothing, and its blocks get a new name."""
    process = Restarts(4)
    view = allocate(process.pool, span(1, 6))
    pool = process.restart({2: "t"})
    assert classes(pool.stats()) == {"free": 4}
    again = allocate(pool, span(1, 16), session=2)
    old = dict(zip(view.block_ids, view.generations, strict=True))
    new = dict(zip(again.block_ids, again.generations, strict=True))
    assert all(new[block] == generation + 1 for block, generation in old.items())


def test_held_blocks_wait_for_every_session() -> None:
    """[G3] What somebody held is out of reach until the last session has resumed, for it may be that one's."""
    process = Restarts(4)
    publish(process.pool, span(1, 8), session=1)
    cache(process.pool, span(21, 24))
    pool = process.restart()
    assert classes(pool.stats()) == {"active": 2, "cached": 1, "free": 1}
    pool.open_session(9, "t")
    with pytest.raises(PoolExhausted):
        allocate(pool, span(50, 61), session=9)
    assert process.finish_resume(1, 2) == [0, 0]
    assert classes(pool.stats())["active"] == 2
    finish(pool.end_session(3))
    finish(pool.writers_quiet(3))
    assert classes(pool.stats())["active"] == 2
    finish(pool.session_quiet(3))
    pool.check_invariants()
    assert classes(pool.stats()) == {"cached": 3, "free": 1}
    allocate(pool, span(50, 61), session=9)


def test_private_blocks_wait_for_their_session_alone() -> None:
    """[G3] RESERVED blocks are free once their own session has resumed without them, or its writers are quiet."""
    process = Restarts(8)
    allocate(process.pool, span(1, 6), session=1)
    allocate(process.pool, span(11, 16), session=2)
    pool = process.restart()
    assert classes(pool.stats()) == {"quarantined": 4, "free": 4}
    assert pool.holding(1).private_block_count == 2
    assert process.finish_resume(1) == [2]
    assert classes(pool.stats()) == {"quarantined": 2, "free": 6}
    finish(pool.end_session(2))
    assert classes(pool.stats()) == {"quarantined": 2, "free": 6}
    finish(pool.writers_quiet(2))
    pool.check_invariants()
    assert (classes(pool.stats()), pool.holding(2).private_block_count) == ({"free": 8}, 0)


def test_a_torn_record_that_was_held_stays_out_of_use() -> None:
    """[L2] [G3] It is a miss, and nobody gets the block while a session may still read it."""
    process = Restarts(4)
    view = publish(process.pool, span(1, 8))
    process.pool._state.ledger.records._digests[view.block_ids[1] * DIGEST_BYTES] ^= 1
    pool = process.restart()
    assert pool.recovered_from is not None
    assert (pool.recovered_from.torn_block_count, pool.recovered_from.missed_block_count) == (1, 1)
    assert present(pool, span(1, 8)) == 4
    assert classes(pool.stats()) == {"active": 1, "quarantined": 1, "free": 2}
    process.finish_resume(1, 2, 3)
    assert classes(pool.stats()) == {"cached": 1, "free": 3}


def test_a_handed_off_sequence_ends_with_the_process() -> None:
    """[L5] Tokens are not in the ledger: what they owned is free, what it had committed stays cached."""
    process = Restarts(8)
    view = allocate(process.pool, span(1, 6), reserve=4)
    finish(process.pool.handoff(1, view.number, Commit(6), token="x", expires_at=9.0))
    pool = process.restart()
    assert process.finish_resume(1, 2, 3) == [0, 0, 0]
    assert classes(pool.stats()) == {"cached": 1, "free": 7}
    with pytest.raises(StaleGeneration):
        process.resume(1, held(view, span(1, 6), computed=6))


def test_pins_outlive_the_process() -> None:
    """[L10] A pin is back under its name with its blocks and its deadline, and ends as any other."""
    process = Restarts(16, warm_budget_ratio=1.0)
    cache(process.pool, span(1, 12))
    finish(process.pool.warmup("t", None, prompt(span(1, 8)), "system", expires_at=50.0))
    finish(process.pool.warmup("t", None, prompt(span(1, 12)), "longer"))
    for _ in range(2):
        pool = process.restart({})
        found = pool.pin("t", "system")
        assert found is not None
        assert (found.pinned_tokens, found.missing_tokens, pool.next_deadline()) == (8, 0, 50.0)
        assert classes(pool.stats()) == {"warm": 3, "free": 13}
        assert pool.pin("u", "system") is None
    finish(pool.expire(50.0))
    finish(pool.unwarm("t", "longer"))
    pool.check_invariants()
    pool = process.restart({})
    assert (classes(pool.stats()), pool.usage().pin_count) == ({"cached": 3, "free": 13}, 0)


def test_a_half_filled_pin_is_filled_on() -> None:
    """[L10] The sequence that fills a pin goes on filling it after a resume, within the budget."""
    process = Restarts(8, warm_budget_ratio=0.5)
    warmed = finish(process.pool.warmup("t", 1, prompt(span(1, 12)), "p"))
    assert warmed.sequence is not None
    commit(process.pool, warmed.sequence, 4)
    pool = process.restart()
    process.resume(1, held(warmed.sequence, span(1, 12), computed=8, pin_name="p"))
    found = pool.pin("t", "p")
    assert found is not None
    assert (found.pinned_tokens, found.missing_tokens, found.filling) == (8, 4, True)
    assert pool.stats().warm_budget_used_block_count == 3
    again = finish(pool.warmup("t", 1, prompt(span(1, 12)), "p", expires_at=50.0))
    assert again.sequence is not None
    assert (again.sequence.number, again.missing_tokens, pool.next_deadline()) == (warmed.sequence.number, 4, 50.0)
    commit(pool, warmed.sequence, 12)
    process.finish_resume(1, 2, 3)
    release(pool, warmed.sequence)
    assert classes(pool.stats()) == {"warm": 3, "free": 5}


def test_a_recovered_pin_that_is_asked_for_with_other_tokens_is_moved() -> None:
    """[L10] Or with other extra keys, or of another namespace: what the ledger has tells it from a repeat."""
    asked = prompt(span(1, 12), [ExtraKey(1, b"image")])
    others = [prompt(span(2, 13)), prompt(span(1, 12), [ExtraKey(1, b"other")]), prompt(span(1, 12), salt=b"s")]
    for other, is_moved in [(asked, False), *((each, True) for each in others)]:
        process = Restarts(8, warm_budget_ratio=0.5)
        warmed = finish(process.pool.warmup("t", 1, asked, "p"))
        assert warmed.sequence is not None
        pool = process.restart()
        process.resume(1, held(warmed.sequence, span(1, 12), extra_keys=asked.extra_keys, pin_name="p"))
        again = finish(pool.warmup("t", 1, other, "p"))
        assert again.sequence is not None
        assert (again.sequence.number != warmed.sequence.number) is is_moved


def test_a_pin_that_nobody_fills_any_more_ends_with_the_last_resume() -> None:
    """A pin without blocks lives only as long as somebody may come back to fill it."""
    process = Restarts(8, warm_budget_ratio=0.5)
    finish(process.pool.warmup("t", 1, prompt(span(1, 8)), "p"))
    pool = process.restart()
    process.finish_resume(1, 2)
    assert pool.pin("t", "p") is not None
    process.finish_resume(3)
    assert pool.pin("t", "p") is None


def test_numbers_and_revisions_are_never_used_again() -> None:
    """A handle or a revision of the process before cannot be taken for one of this."""
    process = Restarts(8)
    old = allocate(process.pool, span(1, 4))
    pool = process.restart()
    process.finish_resume(1)
    assert pool.revision > 1 << 40
    fresh = allocate(pool, span(1, 4))
    assert fresh.number == 1 << 40 | 1
    assert release(pool, old) == 0
    assert pool.holding(1).sequence_count == 1


def test_many_restarts_lose_nothing() -> None:
    """A recovery leaves a ledger that can be recovered from, again and again."""
    process = Restarts(16)
    view = publish(process.pool, span(1, 12))
    for _ in range(5):
        pool = process.restart(SESSIONS)
        process.resume(1, held(view, span(1, 12), computed=12))
        process.finish_resume(1, 2, 3)
        assert classes(pool.stats()) == {"active": 3, "free": 13}


@pytest.mark.slow
def test_a_large_pool_is_back_soon() -> None:
    """[G7] 50,000 committed blocks take far less than the two seconds that the service has to be back."""
    process = Restarts(50_000)
    for first in range(0, 200_000, 20_000):
        cache(process.pool, list(range(first, first + 20_000)))
    start = time.thread_time()
    ledger = process.pool._state.ledger
    pool = type(process.pool).recovered(process.config, ledger, {}, first_number=2, first_revision=1)
    assert time.thread_time() - start < 4.0
    assert pool.stats().cached_block_count == 50_000
