"""Resume: a session gets back what was its own, whatever it knew of the ledger, and nothing else."""

from array import array
from collections.abc import Callable
from dataclasses import replace

import pytest
from calls import allocate, classes, commit, encode, new_pool, present, prompt, publish, release, span
from restarts import Restarts, held

from kvharbor.pool import Commit, ExtraKey, Held, Holding, Shadow
from kvharbor.pool.errors import CursorOutOfRange, InvalidField, PoolError, RequestIdReused, StaleGeneration
from kvharbor.pool.steps import finish

TOKENS = span(1, 14)


@pytest.mark.parametrize("slice_blocks", [1, 512])
@pytest.mark.parametrize("committed", [0, 4, 8])
@pytest.mark.parametrize("computed", [8, 11, 12, 14])
def test_a_sequence_goes_on_where_its_session_is(slice_blocks: int, committed: int, computed: int) -> None:
    """[L12] Behind the ledger, as a reply was lost, or ahead of it, with commits that it could not send."""
    process = Restarts(16, slice_blocks)
    view = allocate(process.pool, span(1, 9), reserve=9, request_id="r", group="g")
    commit(process.pool, view, 8)
    pool = process.restart()
    resumed = process.resume(1, held(view, TOKENS, committed=committed, computed=computed))
    assert resumed.committed_tokens == computed // 4 * 4
    assert resumed.view.block_ids == view.block_ids
    assert (resumed.view.computed_tokens, resumed.view.token_count) == (computed, 14)
    assert (resumed.view.request_id, resumed.view.group, resumed.shadows) == ("r", "g", ())
    assert present(pool, TOKENS) == computed // 4 * 4
    assert process.finish_resume(1, 2, 3) == [0, 0, 0]
    commit(pool, view, 16, [15, 16])
    pool.check_invariants()
    assert present(pool, span(1, 16)) == 16
    assert release(pool, view) == 1
    assert classes(pool.stats()) == {"cached": 4, "free": 12}


def test_a_repeated_resume_tells_the_present_state() -> None:
    """[G4] A call whose reply was lost takes effect once."""
    process = Restarts(16)
    view = allocate(process.pool, span(1, 6), reserve=4)
    process.restart()
    first = process.resume(1, held(view, span(1, 6), computed=6))
    again = process.resume(1, held(view, span(1, 6), computed=6))
    assert (again.view, again.committed_tokens) == (first.view, first.committed_tokens)
    assert process.pool.holding(1).sequence_count == 1
    assert process.finish_resume(1) == [0]
    assert process.finish_resume(1) == [0]


def test_a_shadow_is_resumed_behind_its_own_prefix_alone() -> None:
    """[L11] Elsewhere there is the same content too, but the shadow's bytes are of what comes before it."""
    process = Restarts(16)
    publish(process.pool, span(1, 8), session=2)
    elsewhere = publish(process.pool, [*span(21, 24), *span(5, 8)], session=2)
    view = allocate(process.pool, span(1, 8), most=0)
    commit(process.pool, view, 8)
    process.restart()
    named = replace(
        view,
        block_ids=array("I", [elsewhere.block_ids[0], view.block_ids[1]]),
        generations=array("Q", [elsewhere.generations[0], view.generations[1]]),
    )
    with pytest.raises(StaleGeneration):
        process.resume(1, held(named, [*span(21, 24), *span(5, 8)], committed=8, computed=8))
    process.resume(1, held(view, span(1, 8), committed=8, computed=8))
    process.pool.check_invariants()


def test_shadows_are_resumed_as_shadows() -> None:
    """[P7] An own copy stays readable, its canonical block is held, and both are told again."""
    process = Restarts(16)
    other = publish(process.pool, span(1, 8), session=2)
    keys = (ExtraKey(9, b"image"),)
    view = finish(process.pool.allocate(1, prompt(span(1, 10), keys), max_cached_tokens=0, reserve_tokens=2))
    commit(process.pool, view, 8)
    release(process.pool, other)
    for _ in range(2):
        pool = process.restart()
        resumed = process.resume(1, held(view, span(1, 10), committed=8, computed=10, extra_keys=keys))
        twins = [Shadow(at, other.block_ids[at], other.generations[at]) for at in range(2)]
        assert (list(resumed.shadows), resumed.view.block_ids) == (twins, view.block_ids)
        assert process.finish_resume(1, 2, 3) == [0, 0, 0]
    finish(pool.commit(1, view.number, Commit(10, switched=(0, 1))))
    pool.check_invariants()
    assert classes(pool.stats()) == {"active": 2, "reserved": 1, "free": 13}


def test_a_shadow_that_was_switched_away_is_given_back() -> None:
    """The session has the canonical block in its table already; the switch itself could not be sent."""
    process = Restarts(16)
    other = publish(process.pool, span(1, 4), session=2)
    view = allocate(process.pool, span(1, 6), most=0)
    commit(process.pool, view, 4)
    process.restart()
    switched = replace(
        held(view, span(1, 6), committed=4, computed=6),
        block_ids=other.block_ids + view.block_ids[1:],
        generations=other.generations + view.generations[1:],
    )
    assert process.resume(1, switched).shadows == ()
    assert process.finish_resume(1) == [1]


def test_what_is_full_becomes_a_shadow_if_another_was_first() -> None:
    """A commit that could not be sent is made up for as any other."""
    process = Restarts(16)
    mine = allocate(process.pool, span(1, 6), session=1)
    theirs = allocate(process.pool, span(1, 6), session=2)
    process.restart()
    process.resume(2, held(theirs, span(1, 6), computed=6))
    resumed = process.resume(1, held(mine, span(1, 6), computed=6))
    assert list(resumed.shadows) == [Shadow(0, theirs.block_ids[0], theirs.generations[0])]


REFUSED: dict[str, tuple[Callable[[Held], Held], type[PoolError], str]] = {
    "another generation": (lambda own: _with_block(own, 2, own.block_ids[2], 2), StaleGeneration, "position 2"),
    "a block beyond the pool": (lambda own: _with_block(own, 2, 99), StaleGeneration, "position 2"),
    "a scratch block": (lambda own: _with_block(own, 2, 0), StaleGeneration, "position 2"),
    "another session's block": (lambda own: _with_block(own, 2, 5), StaleGeneration, "position 2"),
    "a free block": (lambda own: _with_block(own, 2, 12), StaleGeneration, "position 2"),
    "a block twice": (lambda own: _with_block(own, 3, own.block_ids[2]), StaleGeneration, "position 3"),
    "a committed block elsewhere": (lambda own: _with_block(own, 1, own.block_ids[0]), StaleGeneration, "position 1"),
    "another namespace": (lambda own: replace(own, salt=b"s"), StaleGeneration, "position 0"),
    "more committed than is": (
        lambda own: replace(own, committed_tokens=12, tail_token_ids=encode([13, 14]), computed_tokens=14),
        CursorOutOfRange,
        "committed_tokens would be 12, at most 8",
    ),
    "less computed than committed": (
        lambda own: replace(own, committed_tokens=4, tail_token_ids=encode(span(5, 14)), computed_tokens=6),
        InvalidField,
        "computed_tokens is 6",
    ),
    "other tokens": (
        lambda own: replace(own, committed_tokens=4, tail_token_ids=encode([*span(5, 7), 99, *span(9, 14)])),
        InvalidField,
        "position 1",
    ),
    "other extra keys": (
        lambda own: replace(
            own, committed_tokens=4, tail_token_ids=encode(span(5, 14)), extra_keys=(ExtraKey(5, b"k"),)
        ),
        InvalidField,
        "position 1",
    ),
    "cursors out of order": (lambda own: replace(own, cached_tokens=13), InvalidField, "cursors"),
    "a tail that is too short": (lambda own: replace(own, tail_token_ids=b""), InvalidField, "tail_token_ids"),
    "committed tokens within a block": (lambda own: replace(own, committed_tokens=6), InvalidField, "whole blocks"),
    "a handle of this process": (lambda own: replace(own, number=1 << 40 | 1), InvalidField, "sequence_id"),
}


def _with_block(own: Held, position: int, block: int, generation: int = 1) -> Held:
    blocks, generations = own.block_ids[:], own.generations[:]
    blocks[position], generations[position] = block, generation
    return replace(own, block_ids=blocks, generations=generations)


@pytest.mark.parametrize("claim", REFUSED)
def test_what_was_not_its_own_is_refused(claim: str) -> None:
    """[L11] [G1] The refused sequence is lost, nothing else is, and its blocks go back with the last call."""
    change, error, text = REFUSED[claim]
    process = Restarts(16, scratch_blocks=1)
    view = allocate(process.pool, span(1, 9), reserve=7)
    allocate(process.pool, span(51, 54), session=2)
    commit(process.pool, view, 8)
    view = replace(view, computed_tokens=8)
    assert list(view.block_ids) == [1, 2, 3, 4]
    process.restart()
    with pytest.raises(error, match=text):
        process.resume(1, change(held(view, TOKENS, committed=8, computed=12)))
    process.pool.check_invariants()
    assert process.pool.holding(1) == Holding(0, 2)
    assert process.finish_resume(1, 2, 3) == [2, 1, 0]
    assert classes(process.pool.stats()) == {"cached": 2, "free": 14}


def test_two_sequences_cannot_have_one_block() -> None:
    """[G2] The second to name a reserved block is refused."""
    process = Restarts(16)
    view = allocate(process.pool, span(1, 6))
    other = allocate(process.pool, span(11, 16))
    process.restart()
    process.resume(1, held(view, span(1, 6)))
    with pytest.raises(StaleGeneration):
        process.resume(1, replace(held(view, span(1, 6)), number=other.number))
    process.pool.check_invariants()


def test_two_sequences_cannot_have_one_request_id() -> None:
    """[G4] A request_id names one live sequence of a session."""
    process = Restarts(16)
    view, other = allocate(process.pool, span(1, 6), request_id="r"), allocate(process.pool, span(11, 16))
    process.restart()
    process.resume(1, held(view, span(1, 6)))
    with pytest.raises(RequestIdReused):
        process.resume(1, replace(held(other, span(11, 16)), request_id="r"))


def test_a_retried_allocate_finds_the_resumed_sequence() -> None:
    """[G4] By its request_id, though the process that was asked first is gone."""
    process = Restarts(16)
    view = allocate(process.pool, span(1, 6), request_id="r")
    pool = process.restart()
    process.resume(1, held(view, span(1, 6)))
    process.finish_resume(1)
    assert allocate(pool, span(1, 6), request_id="r").number == view.number


def test_a_lost_session_is_read_until_it_is_quiet() -> None:
    """[G3] Writers quiet: its private blocks are free, and what is committed stays held for its readers."""
    pool = new_pool(8)
    other = publish(pool, span(1, 4), session=2)
    view = allocate(pool, span(1, 9), reserve=3, most=0)
    commit(pool, view, 8)
    finish(pool.end_session(1))
    assert pool.holding(1) == Holding(1, 2)
    assert classes(pool.stats()) == {"active": 2, "quarantined": 2, "free": 4}
    finish(pool.writers_quiet(1))
    pool.check_invariants()
    assert classes(pool.stats()) == {"active": 2, "free": 6}
    release(pool, other)
    assert classes(pool.stats()) == {"active": 2, "free": 6}
    finish(pool.session_quiet(1))
    pool.check_invariants()
    assert (classes(pool.stats()), pool.holding(1).sequence_count) == ({"cached": 2, "free": 6}, 0)
