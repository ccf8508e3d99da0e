"""Retries, forks, hand-offs and the ends of sessions."""

import pytest
from calls import allocate, classes, commit, encode, new_pool, present, publish, release, span

from kvharbor.pool import Commit, Prompt
from kvharbor.pool.errors import HandoffNotFound, InvariantViolation, RequestIdReused, SequenceBusy, SequenceNotFound
from kvharbor.pool.steps import finish


def test_a_retry_gets_the_present_state() -> None:
    """[G4] A repeated request_id takes effect once; the reply tells what has become of the sequence since."""
    pool = new_pool(8)
    first = allocate(pool, span(1, 6), reserve=4, request_id="r", group="g")
    commit(pool, first, 5)
    again = allocate(pool, span(1, 6), reserve=4, request_id="r", group="g")
    assert (again.number, again.block_ids, again.computed_tokens) == (first.number, first.block_ids, 5)
    assert (pool.stats().sequence_count, pool.stats().counters.allocate_count) == (1, 1)


@pytest.mark.parametrize(
    ("changed", "fields"),
    [
        ("token_ids", {"tokens": span(1, 7)}),
        ("reserve_tokens", {"reserve": 5}),
        ("max_cached_tokens", {"most": 4}),
        ("group", {"group": "h"}),
        ("namespace", {"salt": b"s"}),
    ],
)
def test_a_request_id_stands_for_its_arguments(changed: str, fields: dict[str, object]) -> None:
    """[G4] The same id with another argument is a mistake, and the message names which."""
    pool = new_pool(8)
    asked = {"tokens": span(1, 6), "reserve": 4, "request_id": "r", "group": "g"}
    allocate(pool, **asked)  # type: ignore[arg-type]
    with pytest.raises(RequestIdReused) as refused:
        allocate(pool, **(asked | fields))  # type: ignore[arg-type]
    assert refused.value.attributes["differs"] == changed


def test_a_request_id_is_free_again_after_the_release() -> None:
    """Uniqueness is among a session's live sequences; another session has its own ids."""
    pool = new_pool(8)
    first = allocate(pool, [1], request_id="r")
    assert allocate(pool, [2], session=2, request_id="r").number == 1
    assert finish(pool.release_request(1, "r")) == 1
    assert finish(pool.release_request(1, "r")) == 0
    assert allocate(pool, [3], request_id="r").number == first.number + 1


def test_a_group_ends_at_once() -> None:
    """Release by group ends all members and nobody else; an unknown or empty group is nothing."""
    pool = new_pool(8, slice_blocks=1)
    kept = allocate(pool, [1])
    for token in (2, 3, 4):
        allocate(pool, [token], group="g")
    assert finish(pool.release_group(1, "")) == 0
    assert finish(pool.release_group(2, "g")) == 0
    assert finish(pool.release_group(1, "g")) == 3
    assert finish(pool.release_group(1, "g")) == 0
    assert finish(pool.release(1, kept.number)) == 1


def test_children_share_what_is_published_and_own_the_rest() -> None:
    """[G2] Committed blocks are the same ids; written tails are copied; reserved room is each child's own."""
    pool = new_pool(16)
    source = allocate(pool, span(1, 10), reserve=6)
    commit(pool, source, 6)
    made = finish(pool.fork(1, source.number, 2, reserve_tokens=2, request_id="f", group="g"))
    views = pool.finish_fork(made)
    assert [view.request_id for view in views] == ["f/0", "f/1"]
    assert [len(view.block_ids) for view in views] == [3, 3]
    assert [view.block_ids[0] for view in views] == [source.block_ids[0]] * 2
    assert made.copies == tuple((source.block_ids[1], view.block_ids[1]) for view in views)
    assert len({*source.block_ids, *views[0].block_ids, *views[1].block_ids}) == 8
    assert {(view.cached_tokens, view.computed_tokens, view.token_count) for view in views} == {(6, 6, 10)}
    assert pool.stats().counters.copied_block_count == 2
    pool.check_invariants()


def test_a_repeated_fork_finds_its_children() -> None:
    """[G4] A retry copies nothing; with children missing or other arguments the id is taken."""
    pool = new_pool(16)
    source = publish(pool, span(1, 4))
    made = finish(pool.fork(1, source.number, 2, request_id="f"))
    pool.finish_fork(made)
    again = finish(pool.fork(1, source.number, 2, request_id="f"))
    assert (again.children, again.copies) == (made.children, ())
    assert [view.number for view in pool.finish_fork(again)] == list(made.children)
    for child_count in (1, 3):
        with pytest.raises(RequestIdReused):
            finish(pool.fork(1, source.number, child_count, request_id="f"))
    finish(pool.release_request(1, "f/0"))
    with pytest.raises(RequestIdReused, match="released"):
        finish(pool.fork(1, source.number, 2, request_id="f"))
    finish(pool.release_request(1, "f/1"))
    assert finish(pool.fork(1, source.number, 2, request_id="f")).children == (4, 5)


def test_a_child_name_may_be_taken_by_another_sequence() -> None:
    """[G4] "f/1" of an Allocate and of a Fork cannot both live."""
    pool = new_pool(16)
    source = publish(pool, span(1, 4))
    allocate(pool, [9], request_id="f/1")
    with pytest.raises(RequestIdReused):
        finish(pool.fork(1, source.number, 2, request_id="f"))
    pool.check_invariants()


def test_a_sequence_is_busy_while_it_is_copied() -> None:
    """[G3] Until the copies end nothing frees their blocks: not a retry of the fork either."""
    pool = new_pool(16)
    source = allocate(pool, span(1, 6), group="g")
    commit(pool, source, 6)
    made = finish(pool.fork(1, source.number, 1, request_id="f", group="h"))
    (child,) = made.children
    for steps in (
        pool.release(1, source.number),
        pool.release(1, child),
        pool.release_request(1, "f/0"),
        pool.release_group(1, "g"),
        pool.release_group(1, "h"),
        pool.commit(1, source.number, Commit(6)),
        pool.handoff(1, source.number, Commit(6), token="x", expires_at=1.0),
        pool.fork(1, source.number, 1),
        pool.fork(1, source.number, 1, request_id="f", group="h"),
    ):
        with pytest.raises(SequenceBusy):
            finish(steps)
    finish(pool.extend(1, source.number, 12))
    pool.finish_fork(made)
    assert finish(pool.release(1, source.number)) == 1
    pool.check_invariants()


def test_a_failed_copy_leaves_no_children() -> None:
    """[G4] All children or none: after an abort the pool is as before the fork."""
    pool = new_pool(16)
    source = allocate(pool, span(1, 6))
    commit(pool, source, 6)
    before = classes(pool.stats())
    made = finish(pool.fork(1, source.number, 3, request_id="f"))
    pool.abort_fork(made)
    assert (classes(pool.stats()), pool.stats().sequence_count) == (before, 1)
    assert finish(pool.release(1, made.children[0])) == 0
    assert finish(pool.release(1, source.number)) == 1


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_copy_outlives_its_session(fails: bool, is_lost: bool) -> None:
    """[G3] Blocks of a copy under way stay out of use until it ends, though no process of the session is left."""
    pool = new_pool(8)
    source = allocate(pool, span(1, 6))
    commit(pool, source, 6)
    made = finish(pool.fork(1, source.number, 1))
    if is_lost:
        finish(pool.end_session(1))
    assert finish(pool.session_quiet(1)) == 0
    assert pool.stats().free_block_count == 5
    pool.check_invariants()
    if fails:
        pool.abort_fork(made)
    else:
        pool.finish_fork(made)
    assert (classes(pool.stats()), pool.usage().session_count) == ({"free": 7, "cached": 1}, 2)
    pool.check_invariants()


def test_a_lost_session_is_quarantined_until_it_is_quiet() -> None:
    """[G3] [G6] Committed blocks stay held, private ones wait, and all come back once it is proved quiet."""
    pool = new_pool(8, slice_blocks=1)
    publish(pool, span(1, 4), session=2)
    lost = allocate(pool, span(1, 12), most=0)
    assert len(commit(pool, lost, 8).shadows) == 1
    finish(pool.end_session(1))
    assert classes(pool.stats()) == {"free": 4, "active": 2, "quarantined": 2}
    pool.check_invariants()
    with pytest.raises(SequenceNotFound):
        finish(pool.extend(1, lost.number, 16))
    assert finish(pool.session_quiet(1)) == 1
    assert classes(pool.stats()) == {"free": 6, "active": 1, "cached": 1}
    assert present(pool, span(1, 8)) == 8


def test_a_session_makes_no_call_after_its_end() -> None:
    """[G3] A Release would free blocks that a lost process may still write: it is our bug to let it through."""
    pool = new_pool(8)
    view = allocate(pool, span(1, 6))
    finish(pool.end_session(1))
    for steps in (pool.release(1, view.number), pool.allocate(1, Prompt(encode([1]))), pool.release_group(1, "g")):
        with pytest.raises(InvariantViolation, match="G3"):
            finish(steps)
    with pytest.raises(InvariantViolation, match="G3"):
        pool.adopt(1, "x")
    assert pool.stats().quarantined_block_count == 2


def test_a_handed_off_sequence_belongs_to_its_token() -> None:
    """The source's end does not touch it, its old handle has ended, its partial tail comes along."""
    pool = new_pool(8)
    view = allocate(pool, span(1, 5), reserve=3, request_id="r", group="g")
    asked = Commit(6, encode([6]))
    finish(pool.handoff(1, view.number, asked, token="x", expires_at=30.0))
    assert (release(pool, view), finish(pool.release_request(1, "r")), pool.next_deadline()) == (0, 0, 30.0)
    assert allocate(pool, span(1, 5), request_id="r").number == 2
    finish(pool.end_session(1))
    finish(pool.session_quiet(1))
    adopted = pool.adopt(2, "x", request_id="q", group="h").view
    assert (adopted.block_ids, adopted.cached_tokens, adopted.computed_tokens, adopted.token_count) == (
        view.block_ids,
        6,
        6,
        6,
    )
    assert pool.adopt(2, "x", request_id="q").view.number == adopted.number
    with pytest.raises(RequestIdReused):
        pool.adopt(2, "y", request_id="q")
    with pytest.raises(HandoffNotFound):
        pool.adopt(2, "x")
    assert finish(pool.release_group(2, "h")) == 1


def test_an_unadopted_sequence_is_released() -> None:
    """Past its time the token is worth nothing, and nothing is held for it."""
    pool = new_pool(8)
    view = allocate(pool, span(1, 6))
    finish(pool.handoff(1, view.number, Commit(4), token="x", expires_at=30.0))
    finish(pool.expire(29.9))
    assert pool.stats().sequence_count == 1
    finish(pool.expire(30.0))
    assert (classes(pool.stats()), pool.next_deadline()) == ({"free": 7, "cached": 1}, None)
    with pytest.raises(HandoffNotFound):
        pool.adopt(2, "x")
