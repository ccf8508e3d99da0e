"""Who reuses what from whom, in stories. Rules [U1] to [U4]; `tests/model/naive_engines.py` knows all of them."""

import pytest
from block_calls import acquire, commit, keys, lease, release
from block_calls import publish as publish_blocks
from calls import allocate, cache, publish, span
from calls import commit as commit_sequence
from restarts import Restarts

from kvharbor.pool import Engine, EngineGroup, EngineStats, Pool, PoolConfig, engines
from kvharbor.pool.steps import finish

A, B = Engine("vllm", "1", "a"), Engine("sglang", "2", "b")


def pool_of(*named: Engine, block_count: int = 32) -> Pool:
    """A pool whose sessions 1, 2, ... are of these engines."""
    pool = Pool(PoolConfig(block_count, 4))
    for session, engine in enumerate(named, 1):
        pool.open_session(session, "t", engine)
    return pool


def row(pool: Pool, engine: Engine) -> EngineStats:
    (found,) = [one for one in pool.stats().engines if one.engine == engine and one.group is EngineGroup.NONE]
    return found


def matrix(pool: Pool) -> dict[tuple[str, str], int]:
    """Tokens by (who reuses, who has published); groups by their names."""
    told = pool.stats().engines
    name = [one.engine.instance or one.engine.name or one.group.value for one in told]
    return {(name[place], name[of]): count for place, one in enumerate(told) for of, count in one.reuses}


def test_what_another_has_published_is_reused_of_that_one() -> None:
    """[U1] [U2] By sequences and by block calls; the pool's own counters have the sum."""
    pool = pool_of(A, B)
    cache(pool, span(1, 8), session=1)
    allocate(pool, span(1, 9), session=2)
    commit(pool, lease(pool, 1, session=2), keys("x"), session=2)
    acquire(pool, keys("x"), session=1, computes=True)
    allocate(pool, span(1, 9), session=1)
    assert matrix(pool) == {("b", "a"): 8, ("a", "b"): 4, ("a", "a"): 8}
    stats = pool.stats()
    assert stats.counters.reused_token_count == sum(one.reused_token_count for one in stats.engines) == 20
    assert stats.counters.prompt_token_count == sum(one.prompt_token_count for one in stats.engines) == 30
    assert [(one.engine, one.committed_block_count) for one in stats.engines] == [(B, 1), (A, 2)]
    pool.check_invariants()


def test_who_comes_second_with_a_content_is_no_author() -> None:
    """[U1] His block is a shadow; what others reuse is the canonical one."""
    pool = pool_of(A, B, A)
    first, second = allocate(pool, span(1, 8), session=1), allocate(pool, span(1, 8), session=2)
    for view in (first, second):
        commit_sequence(pool, view, 8)
    allocate(pool, span(1, 9), session=3)
    assert matrix(pool) == {("a", "a"): 8}
    assert row(pool, B).committed_block_count == 0


def test_an_acquire_that_uses_is_a_request_and_one_that_asks_is_none() -> None:
    """[U2] Whoever only copies what is there counts too, if it says so."""
    pool = pool_of(A, B)
    release(pool, publish_blocks(pool, keys("xy"), 2))
    acquire(pool, keys("xyz"), session=2)
    assert (row(pool, B).prompt_token_count, matrix(pool)) == (0, {})
    finish(pool.acquire(2, keys("xyz"), uses=True))
    assert (row(pool, B).prompt_token_count, matrix(pool)) == (12, {("b", "a"): 8})


def test_what_an_engine_holds() -> None:
    """Blocks of its sequences, each for itself, and those that its sessions hold by themselves; sessions by name."""
    pool = pool_of(A, A, B)
    publish(pool, span(1, 8), session=1)
    allocate(pool, span(1, 9), session=2)
    lease(pool, 4, session=2)
    assert (row(pool, A).session_count, row(pool, A).held_block_count) == (2, 2 + 3 + 4)
    assert (row(pool, B).session_count, row(pool, B).held_block_count) == (1, 0)


def test_an_engine_stays_when_its_sessions_have_ended_and_is_the_same_when_it_comes_back() -> None:
    """[U3] Until then it has no session; what it has published is still reused of it."""
    pool = pool_of(A, B)
    cache(pool, span(1, 8), session=1)
    finish(pool.session_quiet(1))
    assert (row(pool, A).session_count, row(pool, A).committed_block_count) == (0, 2)
    allocate(pool, span(1, 9), session=2)
    pool.open_session(3, "t", A)
    allocate(pool, span(1, 9), session=3)
    assert matrix(pool) == {("b", "a"): 8, ("a", "a"): 8}
    assert row(pool, A).session_count == 1


def test_an_engine_without_a_session_and_without_figures_is_not_told() -> None:
    pool = pool_of(A, B)
    finish(pool.session_quiet(1))
    assert [one.engine for one in pool.stats().engines] == [B]


def test_what_an_earlier_process_has_is_a_group_of_its_own() -> None:
    """[U1] Nobody has recorded whose it is; all that is published from then on has an author."""
    world = Restarts(16)
    cache(world.pool, span(1, 8))
    pool = world.restart()
    pool.name_engine(1, A)
    world.finish_resume(1, 2, 3)
    publish(pool, span(1, 13), session=1)
    (named, earlier) = (row(pool, A), pool.stats().engines[-1])
    assert (earlier.group, earlier.committed_block_count, earlier.session_count) == (EngineGroup.EARLIER, 2, 0)
    assert (named.reused_token_count, named.committed_block_count) == (8, 1)
    assert matrix(pool) == {("a", "earlier"): 8}


def test_thousands_of_sessions_make_a_bounded_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """[U3] Those that have been gone the longest are told together, by name and version; no sum changes."""
    monkeypatch.setattr(engines, "MOST", 8)
    pool = Pool(PoolConfig(8, 4))
    for session in range(1, 2001):
        pool.open_session(session, "t", Engine("vllm", str(session // 1000), str(session)))
        cache(pool, span(1, 4) if session % 2 else span(1, 5), session=session)
        finish(pool.session_quiet(session))
    told = pool.stats().engines
    assert [one.engine.instance for one in told if one.engine.version == "1"] == ["", *map(str, range(1995, 2000))]
    assert [one.engine for one in told if one.engine.version == "0"] == [Engine("vllm", "0")]
    assert sum(one.prompt_token_count for one in told) == 1000 * 4 + 1000 * 5
    assert len(told) <= 8 + 2
    pool.check_invariants()


def test_an_engine_without_an_instance_is_all_of_its_name_and_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """[U3] One that comes as others are told together for it is told with them."""
    monkeypatch.setattr(engines, "MOST", 2)
    pool = pool_of(A, B)
    finish(pool.session_quiet(1))
    pool.open_session(3, "t", A.kind)
    pool.check_invariants()
    cache(pool, span(1, 8), session=3)
    assert row(pool, A.kind).committed_block_count == 2
    pool.open_session(4, "t", Engine("x", "1", "c"))
    pool.check_invariants()


def test_versions_are_told_together_under_their_name_and_no_counter_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    """[U3] What is read by name has all that it had, whoever else comes."""
    monkeypatch.setattr(engines, "MOST", 3)
    pool = pool_of(Engine("vllm", "1", "a"), Engine("vllm", "2", "b"), Engine("x", "1", "c"))
    for session in (1, 2, 3):
        cache(pool, span(1, 8), session=session)
    finish(pool.session_quiet(1))
    finish(pool.session_quiet(2))
    pool.open_session(4, "t", B)
    cache(pool, span(1, 8), session=4)
    assert row(pool, Engine("vllm")).prompt_token_count == 16
    assert row(pool, B).prompt_token_count == 8
    assert not [one for one in pool.stats().engines if one.group is EngineGroup.OTHERS]
    pool.check_invariants()


@pytest.mark.parametrize("version", ["1", "2"])
def test_where_nothing_else_makes_room_one_is_told_with_another_of_its_name(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """[U3] With one that has gone: of its version, if that was the same."""
    monkeypatch.setattr(engines, "MOST", 2)
    pool = pool_of(A, B)
    cache(pool, span(1, 8), session=1)
    finish(pool.session_quiet(1))
    pool.open_session(3, "t", Engine("vllm", version, "c"))
    cache(pool, span(1, 8), session=3)
    together = Engine("vllm", "1") if version == "1" else Engine("vllm")
    assert row(pool, together).prompt_token_count == 16
    pool.check_invariants()


def test_no_name_gives_way_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """[U3] Its counters would fall if it came again; the one that is too many is among the others."""
    monkeypatch.setattr(engines, "MOST", 2)
    pool = pool_of(A, B)
    finish(pool.session_quiet(1))
    finish(pool.session_quiet(2))
    pool.open_session(3, "t", Engine("x", "1", "c"))
    cache(pool, span(1, 8), session=3)
    assert [(one.group, one.prompt_token_count) for one in pool.stats().engines] == [(EngineGroup.OTHERS, 8)]
    pool.open_session(4, "t", A)
    cache(pool, span(1, 8), session=4)
    assert row(pool, A).prompt_token_count == 8


def test_where_all_have_sessions_a_further_one_is_among_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """[U3] It is told with those of its kind if there is a row of them, and is not taken for anybody else."""
    monkeypatch.setattr(engines, "MOST", 2)
    pool = pool_of(A, B, Engine("x", "1", "c"))
    publish(pool, span(1, 8), session=3)
    allocate(pool, span(1, 9), session=1)
    assert matrix(pool) == {("a", "others"): 8}
    assert pool.stats().engines[-1].session_count == 1
    pool.check_invariants()
