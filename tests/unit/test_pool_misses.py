"""Why a miss: the reasons in small stories, and bounds of what is remembered and sampled."""

import hashlib

import pytest
from calls import allocate, cache, commit, encode, new_pool, prompt, publish, release, span

from kvharbor.pool import Miss, MissKind, Pool, Prompt
from kvharbor.pool.evicted import ADMINISTRATOR, EvictedContents, Eviction
from kvharbor.pool.steps import finish
from kvharbor.pool.traffic import BOUNDS_S, Traffic


def digest(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def looked_up(pool: Pool, tokens: list[int], tenant: str = "t", salt: bytes = b"") -> Miss:
    miss = finish(pool.lookup(tenant, prompt(tokens, salt=salt))).miss
    assert miss is not None
    return miss


def test_an_eviction_is_told_with_its_session_and_age() -> None:
    """[Y1] [Y3] "Evicted for session 2, five seconds ago", about the first block that is gone."""
    pool = new_pool(4, history=True)
    pool.tell_time(100.0)
    cache(pool, span(1, 16))
    pool.tell_time(110.0)
    other = publish(pool, span(50, 57), session=2)
    pool.tell_time(115.0)
    release(pool, other)
    view = allocate(pool, span(1, 16))
    assert view.miss == Miss(MissKind.EVICTED, 8, 15.0, 5.0, 2)
    assert looked_up(pool, [*span(1, 8), *span(60, 64)]).kind is MissKind.NEVER_SEEN


def test_an_administrator_is_named_and_another_tenant_is_not() -> None:
    """[Y2] [G8] That the block was evicted is the caller's own; for whom is not always."""
    pool = new_pool(4, history=True)
    cache(pool, span(1, 4))
    finish(pool.evict_unheld())
    assert looked_up(pool, span(1, 5)).evicted_by == ADMINISTRATOR
    cache(pool, span(1, 4))
    cache(pool, span(1, 16), session=3)
    miss = looked_up(pool, span(1, 5))
    assert (miss.kind, miss.evicted_by) == (MissKind.EVICTED, None)


def test_another_tenants_content_was_never_seen() -> None:
    """[Y2] [G8] Present, evicted or being computed: to others it is as if it had never been."""
    pool = new_pool(8, history=True)
    cache(pool, span(1, 4), session=3)
    assert looked_up(pool, span(1, 5)).kind is MissKind.NEVER_SEEN
    finish(pool.evict_unheld())
    assert looked_up(pool, span(1, 5)).kind is MissKind.NEVER_SEEN
    allocate(pool, span(1, 4), session=3)
    assert looked_up(pool, span(1, 5)).kind is MissKind.NEVER_SEEN
    assert looked_up(pool, span(1, 5), tenant="u").kind is MissKind.NOT_COMMITTED


def test_another_namespace_is_told_by_the_parts_that_differ() -> None:
    """[Y1] [Y2] Which ones, never what they are, and only once something is committed there."""
    pool = new_pool(8, history=True)
    view = finish(pool.allocate(1, Prompt(encode(span(1, 4)), version="1", salt=b"secret")))
    assert looked_up(pool, span(1, 4)).kind is MissKind.NEVER_SEEN
    commit(pool, view, 4)
    miss = looked_up(pool, span(1, 4))
    assert (miss.kind, miss.differ) == (MissKind.OTHER_NAMESPACE, ("version", "salt"))


def test_a_short_match_is_below_the_threshold() -> None:
    """[Y1] It is there and not used."""
    pool = new_pool(8, min_reuse_tokens=8, history=True)
    publish(pool, span(1, 4))
    view = allocate(pool, span(1, 16))
    assert view.miss == Miss(MissKind.BELOW_THRESHOLD, 4, 0.0)


def test_nothing_more_to_be_had_is_no_miss() -> None:
    """All but one token, or as many as the caller allows; a retry gets the first answer's reason."""
    pool = new_pool(8, history=True)
    publish(pool, span(1, 8))
    assert allocate(pool, span(1, 8)).miss is None  # of the second block one token has to be computed
    assert allocate(pool, span(1, 8), most=0).miss is None
    assert finish(pool.lookup("t", prompt(span(1, 9)))).miss is None
    first = allocate(pool, span(1, 12), most=12, request_id="r")
    commit(pool, first, 12)
    again = allocate(pool, span(1, 12), most=12, request_id="r")
    assert again.miss == first.miss
    assert again.miss is not None


def test_the_memory_of_evictions_is_bounded() -> None:
    """[Y3] [Y4] The last ones are known; it says how far back it is complete."""
    evicted = EvictedContents(100)
    evicted.begin(0.0)
    for number in range(350):
        evicted.remember([digest(number)], Eviction(float(number), 1, "t"))
        known = [each for each in range(number + 1) if evicted.of(digest(each)) is not None]
        assert len(known) <= 200
        assert set(range(max(0, number - 99), number + 1)) <= set(known)
        assert all(each in known for each in range(number + 1) if each > evicted.complete_since)


def test_the_sample_is_bounded_and_says_what_all_would() -> None:
    """[Y4] Ten thousand contents, each published twice with a second between: estimates within a tenth."""
    traffic = Traffic()
    for time in (0.0, 1.0):
        for number in range(10_000):
            traffic.published([number], [digest(number)], time)
            traffic.evicted([number], time + 5.0)
    assert len(traffic._used_at) <= 1024
    assert len(traffic._resident) <= 1024
    assert traffic.recomputed_block_count == pytest.approx(10_000, rel=0.1)
    gaps = traffic.reuse_gaps
    assert gaps.counts[BOUNDS_S.index(1.0)] == sum(gaps.counts) == pytest.approx(10_000, rel=0.1)
    residences = traffic.residences.counts
    assert residences[BOUNDS_S.index(16.0)] == sum(residences)


def test_a_small_pool_is_counted_exactly() -> None:
    """Hits and computations again, by how soon; how long what was evicted had been there."""
    pool = new_pool(4, history=True)
    pool.tell_time(10.0)
    cache(pool, span(1, 16))
    pool.tell_time(11.0)
    release(pool, allocate(pool, span(1, 8), most=8))  # two blocks again after a second
    pool.tell_time(40.0)
    finish(pool.evict_unheld())
    cache(pool, span(1, 16))  # two after 29 s, two after 30 s
    traffic = pool.stats().traffic
    assert traffic.recomputed_block_count == 4
    assert traffic.reuse_gaps.counts[BOUNDS_S.index(1.0)] == 2
    assert traffic.reuse_gaps.counts[BOUNDS_S.index(64.0)] == 4
    assert traffic.reuse_gaps.sum_s == 2 * 1.0 + 2 * 29.0 + 2 * 30.0
    assert (traffic.residences.counts[BOUNDS_S.index(64.0)], traffic.residences.sum_s) == (4, 120.0)
    assert (traffic.misses[MissKind.NEVER_SEEN], traffic.misses[MissKind.EVICTED]) == (1, 1)
