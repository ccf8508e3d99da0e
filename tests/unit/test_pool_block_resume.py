"""What a session held by itself, after the process was replaced: what the ledger says was its own, and no more. [B7]"""

from array import array

import pytest
from block_calls import NONE, acquire, commit, invalidate, keys, lease, part, publish, release, tokens
from calls import allocate, classes, encode, span
from journal import Journal, watch
from restarts import SESSIONS, Restarts, held

from kvharbor.pool import BlockRun, Commit, Holding, Ledger, Pool, PoolConfig, Shadow, ledger_bytes
from kvharbor.pool.steps import finish


def join(*runs: BlockRun) -> BlockRun:
    blocks, ages = array("I"), array("Q")
    for run in runs:
        blocks += run.block_ids
        ages += run.generations
    return BlockRun(blocks, ages)


def resume(pool: Pool, blocks: BlockRun, session: int = 1) -> BlockRun:
    lost = finish(pool.resume_blocks(session, blocks))
    pool.check_invariants()
    return lost


@pytest.mark.parametrize("opaque", [False, True])
def test_a_session_takes_up_all_that_it_held(opaque: bool) -> None:
    """[G7] Leased, committed and shadows, in whatever order it names them, and as often as it likes."""
    before = Restarts(24, slice_blocks=2)
    pool = before.pool
    chain = keys("abc") if opaque else tokens(span(1, 12))
    theirs = publish(pool, chain, 3, session=2)
    shadows, leased = lease(pool, 3), lease(pool, 2)
    twins = [Shadow(index, theirs.block_ids[index], 1) for index in range(3)]
    assert commit(pool, shadows, chain) == twins
    own = publish(pool, tokens(span(21, 32)), 3)
    release(pool, theirs, session=2)
    pool = before.restart()
    everything = join(part(own, 2), leased, shadows, part(own, 0, 2))
    assert resume(pool, everything) == NONE
    assert resume(pool, everything) == NONE
    assert pool.holding(1) == Holding(0, 5, 6, 2)
    before.finish_resume(1, 2, 3)
    assert classes(pool.stats()) == {"free": 13, "reserved": 2, "active": 9}
    assert resume(pool, everything) == NONE
    assert commit(pool, shadows, chain) == twins
    assert len(acquire(pool, tokens(span(21, 32)), session=2).held) == 3
    assert release(pool, everything) == 8
    pool.check_invariants()
    assert classes(pool.stats()) == {"free": 18, "active": 3, "cached": 3}


def test_what_is_not_named_is_given_back() -> None:
    before = Restarts(16)
    own, leased = publish(before.pool, keys("ab"), 2), lease(before.pool, 3)
    pool = before.restart()
    assert resume(pool, part(leased, 0, 1)) == NONE
    assert before.finish_resume(1, 2, 3) == [2, 0, 0]
    assert classes(pool.stats()) == {"free": 13, "reserved": 1, "cached": 2}
    assert resume(pool, join(own, part(leased, 1))) == join(own, part(leased, 1))


def test_a_commit_whose_reply_was_lost_is_found_and_repeated() -> None:
    """[G4] The session names its blocks as leased ones, commits again, and nothing is committed twice."""
    before = Restarts(16)
    own = lease(before.pool, 3)
    commit(before.pool, part(own, 0, 2), keys("ab"))
    pool = before.restart()
    assert resume(pool, own) == NONE
    before.finish_resume(1, 2, 3)
    assert commit(pool, own, keys("abc")) == []
    assert len(acquire(pool, keys("abc"), session=2).held) == 3
    pool.check_invariants()


def test_a_session_gets_nothing_of_others() -> None:
    """[L11] [G8] Neither their leased blocks nor another tenant's committed ones, nor those of another generation."""
    before = Restarts(16)
    leased, foreign = lease(before.pool, 1, session=2), publish(before.pool, keys("a"), 1, session=3)
    own, again = lease(before.pool, 1), lease(before.pool, 1)
    release(before.pool, again)
    pool = before.restart()
    stale = BlockRun(own.block_ids, array("Q", [2]))
    unknown = BlockRun(array("I", [16, 4_000_000_000]), array("Q", [1, 1]))
    assert resume(pool, leased) == leased
    assert resume(pool, foreign) == foreign
    assert resume(pool, stale) == stale
    assert resume(pool, again) == again
    assert resume(pool, unknown) == unknown
    assert resume(pool, own) == NONE
    before.finish_resume(*SESSIONS)
    assert classes(pool.stats()) == {"free": 14, "reserved": 1, "cached": 1}


def test_a_tail_is_enough_to_hold_all_before_it() -> None:
    """[B2] As an Acquire does, if there is room: what nobody held may have gone."""
    before = Restarts(16)
    own = publish(before.pool, keys("abcd"), 4)
    pool = before.restart()
    assert resume(pool, part(own, 3)) == NONE
    before.finish_resume(*SESSIONS)
    assert classes(pool.stats()) == {"free": 12, "active": 4}
    assert release(pool, part(own, 0, 3)) == 0
    assert release(pool, own) == 1
    assert classes(pool.stats()) == {"free": 12, "cached": 4}


def test_what_nobody_held_takes_no_claimed_room() -> None:
    """[G5]"""
    before = Restarts(8, slice_blocks=1)
    own = publish(before.pool, keys("ab"), 2)
    release(before.pool, own)
    pool = before.restart()
    under_way = pool.lease(2, 8, 8)
    next(under_way)
    assert resume(pool, own) == own
    assert len(finish(under_way)) == 8
    pool.check_invariants()


def test_appended_blocks_are_in_a_table_or_not() -> None:
    """[B5] The session says which, and sends its commit again."""
    before = Restarts(16)
    view = allocate(before.pool, span(1, 4))
    own = lease(before.pool, 2)
    pool = before.restart()
    assert before.resume(1, held(view, span(1, 4))).view.block_ids == view.block_ids
    assert resume(pool, own) == NONE
    asked = Commit(4, encode(span(5, 8)), known_token_count=4, appended=part(own, 0, 1))
    finish(pool.commit(1, view.number, asked))
    pool.check_invariants()
    assert resume(pool, part(own, 0, 1)) == part(own, 0, 1), "it is in a table by now"
    before.finish_resume(*SESSIONS)
    assert pool.holding(1) == Holding(1, 2, 0, 1)


def test_a_session_that_resumes_no_more_loses_its_blocks() -> None:
    before = Restarts(16)
    publish(before.pool, keys("ab"), 2)
    lease(before.pool, 2)
    pool = before.restart({1: "t"})
    finish(pool.session_quiet(1))
    pool.check_invariants()
    assert classes(pool.stats()) == {"free": 14, "cached": 2}


def test_a_kill_while_a_block_is_invalidated_leaves_the_rest_as_it_was() -> None:
    """[L4] Children go first: whatever is committed still has its prefix."""
    config = PoolConfig(16, 4)
    buffer = bytearray(ledger_bytes(config))
    ledger = Ledger.create(config, buffer)
    pool = Pool(config, ledger)
    pool.open_session(1, "t")
    own = publish(pool, keys("abcdef"), 6)
    release(pool, part(own, 3))
    journal = Journal(buffer, lambda: None)
    watch(ledger, journal)
    invalidate(pool, part(own, 1, 2))
    counts = []
    for image, _, _ in journal.prefixes():
        after = Pool.recovered(config, Ledger.open(config, image), {1: "t"}, first_number=2, first_revision=99)
        after.check_invariants()
        found = after.recovered_from
        assert found is not None
        assert (found.missed_block_count, found.torn_block_count) == (0, 0)
        counts.append(found.committed_block_count)
    assert sorted(set(counts)) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("column", ["_digests", "_contents", "parents", "parent_ages"])
def test_a_shadow_whose_record_is_scribbled_is_lost(column: str) -> None:
    """[L11] Its bytes would stand for another content."""
    before = Restarts(16)
    publish(before.pool, keys("ab"), 2, session=2)
    first = acquire(before.pool, keys("a")).held
    own = lease(before.pool, 1)
    commit(before.pool, own, keys("b", "a"), first)
    pool = before.restart()
    records = getattr(pool._state.ledger.records, column)
    place = own.block_ids[0] * (32 if column.startswith("_") else 1)
    records[place] ^= 1
    assert resume(pool, own) == own
    before.finish_resume(*SESSIONS)
    assert classes(pool.stats()) == {"free": 14, "cached": 2}
