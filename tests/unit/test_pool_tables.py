"""What a session may have in the tables of its sequences, shared blocks or not. Rule [P8]."""

from collections.abc import Callable

import pytest
from block_calls import lease
from calls import allocate, cache, commit, encode, new_pool, prompt, release, span
from restarts import Restarts, held

from kvharbor.pool import Adopted, Commit, ExtraKey, Pool, SequenceView, lifecycle
from kvharbor.pool.errors import TablesFull
from kvharbor.pool.sequence import MAX_SHARED_ENTRIES, SEQUENCE_ENTRIES
from kvharbor.pool.steps import Steps, finish

PROMPT = span(1, 16)
BLOCKS = 4
ONE = BLOCKS + SEQUENCE_ENTRIES


def pool_for(sequence_count: int) -> Pool:
    """A pool with PROMPT cached, a session of which may have so many sequences of it."""
    pool = new_pool(32)
    cache(pool, PROMPT)
    pool._state.most_entries = sequence_count * ONE
    return pool


def share(pool: Pool, session: int = 1) -> SequenceView:
    """A sequence that takes no room."""
    return allocate(pool, PROMPT, session, most=len(PROMPT))


def handoff(pool: Pool, view: SequenceView, token: str) -> None:
    finish(pool.handoff(view.session, view.number, Commit(len(PROMPT)), token=token, expires_at=10.0))


def adopt(pool: Pool, session: int, token: str) -> Adopted:
    return pool.adopt(session, token)


def test_one_that_releases_nothing_is_refused_and_goes_on_once_it_does() -> None:
    """By sequences that need no fresh block at all; another session has as many of its own."""
    pool = pool_for(3)
    views = [share(pool) for _ in range(3)]
    before = pool.stats()
    with pytest.raises(TablesFull) as refused:
        share(pool)
    assert refused.value.metadata() == {
        "neededEntryCount": str(ONE),
        "heldEntryCount": str(3 * ONE),
        "budgetEntryCount": str(3 * ONE),
    }
    assert pool.stats() == before
    share(pool, session=2)
    release(pool, views[0])
    share(pool)
    pool.check_invariants()


def test_every_session_may_have_the_whole_pool_for_itself() -> None:
    """What it shares counts beside that."""
    assert new_pool(32)._state.most_entries == 32 + MAX_SHARED_ENTRIES
    assert MAX_SHARED_ENTRIES >= SEQUENCE_ENTRIES << 16


GROWTHS: list[tuple[str, Callable[[Pool, SequenceView], Steps[object]]]] = [
    ("Extend", lambda pool, one: pool.extend(1, one.number, len(PROMPT) + 1)),
    ("Fork", lambda pool, one: pool.fork(1, one.number, 1)),
    ("a Commit that appends", lambda pool, one: pool.commit(1, one.number, Commit(16, appended=lease(pool, 1)))),
    ("a Warmup to fill", lambda pool, _: pool.warmup("t", 1, prompt(span(1, 20)), "w")),
]


@pytest.mark.parametrize(("name", "grow"), GROWTHS, ids=[name for name, _ in GROWTHS])
def test_whatever_grows_a_table_is_refused(name: str, grow: Callable[[Pool, SequenceView], Steps[object]]) -> None:
    """And has changed nothing; with room for it, it is not."""
    pool = pool_for(2)
    one, other = share(pool), share(pool)
    with pytest.raises(TablesFull):
        finish(grow(pool, one))
    pool.check_invariants()
    release(pool, other)
    pool._state.most_entries += 1
    finish(grow(pool, one))
    pool.check_invariants()


def test_a_warmup_that_gives_no_sequence_needs_no_entry() -> None:
    pool = pool_for(1)
    share(pool)
    assert finish(pool.warmup("t", 1, prompt(PROMPT), "w")).pinned_tokens == len(PROMPT)


def test_a_warmup_to_fill_counts_with_what_it_shares() -> None:
    """It has all of that in its table."""
    pool = pool_for(2)
    share(pool)
    with pytest.raises(TablesFull):
        finish(pool.warmup("t", 1, prompt(span(1, 20)), "w"))
    pool._state.most_entries += 1
    finish(pool.warmup("t", 1, prompt(span(1, 20)), "w"))
    pool.check_invariants()


def test_an_extend_to_what_is_there_is_never_refused() -> None:
    """It is how a caller asks for its table again."""
    pool = pool_for(1)
    one = share(pool)
    pool._state.most_entries = 0
    assert len(finish(pool.extend(1, one.number, 0, 0)).block_ids) == BLOCKS


def test_a_commit_that_is_repeated_is_never_refused() -> None:
    """Its blocks are in the table; a session that has resumed may be over the bound."""
    pool = pool_for(2)
    one = share(pool)
    asked = Commit(len(PROMPT), appended=lease(pool, 1))
    finish(pool.commit(1, one.number, asked))
    pool._state.most_entries = ONE
    finish(pool.commit(1, one.number, asked))
    pool.check_invariants()


def test_what_is_handed_off_is_its_givers_until_somebody_has_it() -> None:
    """Or it would be a way around the bound."""
    pool = pool_for(2)
    handoff(pool, share(pool), "a")
    handoff(pool, share(pool), "b")
    with pytest.raises(TablesFull):
        share(pool)
    adopt(pool, 2, "a")
    share(pool)
    with pytest.raises(TablesFull):
        share(pool)
    adopt(pool, 1, "b")
    pool.check_invariants()


def test_one_who_has_too_much_adopts_nothing_and_it_stays_to_be_adopted() -> None:
    pool = pool_for(1)
    share(pool, session=2)
    handoff(pool, share(pool), "a")
    with pytest.raises(TablesFull):
        adopt(pool, 2, "a")
    adopt(pool, 1, "a")
    pool.check_invariants()


def test_what_nobody_adopts_is_its_givers_no_more_when_its_time_is_over() -> None:
    pool = pool_for(1)
    handoff(pool, share(pool), "a")
    finish(pool.expire(10.0))
    share(pool)
    handoff(pool, allocate(pool, PROMPT, 2, most=len(PROMPT)), "b")
    finish(pool.session_quiet(2))
    finish(pool.expire(10.0))
    pool.check_invariants()


def test_a_lost_session_counts_what_is_left() -> None:
    """Its private blocks go before its read holds do."""
    pool = new_pool(32)
    allocate(pool, PROMPT, reserve=8)
    finish(pool.end_session(1))
    finish(pool.writers_quiet(1))
    pool.check_invariants()


def test_the_end_of_one_with_many_shared_blocks_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in slices, although there is nothing private to take back."""
    monkeypatch.setattr(lifecycle, "ENTRIES_A_SLICE", 3 * ONE)
    pool = pool_for(10)
    for _ in range(10):
        share(pool)
    assert len(list(pool.end_session(1))) == 3
    pool.check_invariants()
    assert len(list(pool.writers_quiet(1))) == 3
    pool.check_invariants()


def test_what_was_allowed_is_resumed_and_no_session_takes_up_without_end() -> None:
    """A session at its bound may name some more, whose Release has had no reply; not any number."""
    world = Restarts(32)
    cache(world.pool, PROMPT)
    views = [share(world.pool) for _ in range(5)]
    pool = world.restart()
    pool._state.most_entries = 2 * ONE
    for view in views[:4]:
        world.resume(1, held(view, PROMPT, committed=16))
    with pytest.raises(TablesFull):
        world.resume(1, held(views[4], PROMPT, committed=16))
    assert finish(pool.resume(1, held(views[0], PROMPT, committed=16))).view.block_ids == views[0].block_ids
    world.finish_resume(1, 2, 3)
    with pytest.raises(TablesFull):
        share(pool)


def test_a_sequence_keeps_no_extra_keys_of_what_it_has_found() -> None:
    """The tree has them once; a long prompt of many images would be kept by each that shares it."""
    pool = new_pool(32)
    keys = [ExtraKey(at, bytes(200)) for at in range(20)]
    asked = prompt(span(1, 20), keys)
    first = finish(pool.allocate(1, asked, request_id="a"))
    commit(pool, first, 20)
    second = finish(pool.allocate(1, asked, max_cached_tokens=20, request_id="b"))
    assert pool._state.sessions[1].sequences[second.number].extras == {}
    third = finish(pool.allocate(1, asked, request_id="c"))
    finish(pool.handoff(1, third.number, Commit(16), token="x", expires_at=1.0))
    assert pool.adopt(2, "x").extra_keys == tuple(keys[16:])
    assert finish(pool.allocate(1, asked, max_cached_tokens=20, request_id="b")).number == second.number
    assert encode(span(17, 20)) == bytes(pool._state.sessions[2].sequences[1].tail)
