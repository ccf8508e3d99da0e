"""Who computes what, told as stories: what the walks against the naive model leave out."""

from calls import allocate, commit, encode, new_pool, prompt, publish, release, span

from kvharbor.pool import Awaited, Commit, ExtraKey, Outlook, Pool, Prompt, SequenceView
from kvharbor.pool.steps import finish
from kvharbor.pool.writers import PATIENCE_S


def waits(pool: Pool, asked: Prompt, session: int = 2) -> SequenceView | Awaited:
    """Asks as one that lets others finish."""
    outcome = finish(pool.allocate_unless_pending(session, asked))
    pool.check_invariants()
    return outcome


def told(pool: Pool, asked: Prompt, session: int = 2, most: int | None = None) -> int:
    """Asks, leaves, and returns how many tokens were told to be pending."""
    view = finish(pool.allocate(session, asked, max_cached_tokens=most))
    release(pool, view)
    return 0 if view.pending is None else view.pending.token_count


def test_another_tenant_and_another_namespace_learn_nothing() -> None:
    """[W2] [G8] Session 3 is of tenant u; a salt makes a namespace."""
    pool = new_pool(64)
    allocate(pool, span(1, 20), session=1)
    assert told(pool, prompt(span(1, 20)), session=2) == 16
    assert told(pool, prompt(span(1, 20)), session=3) == 0
    assert told(pool, prompt(span(1, 20), salt=b"s"), session=2) == 0
    assert isinstance(waits(pool, prompt(span(1, 20)), session=3), SequenceView)


def test_extra_keys_tell_equal_tokens_apart() -> None:
    """[W2] What is pending ends before the first block whose keys differ, and nobody waits for that one."""
    pool = new_pool(64)
    finish(pool.allocate(1, prompt(span(1, 20), [ExtraKey(1, b"cat"), ExtraKey(9, b"cat")])))
    same, first_differs, third_differs = (
        prompt(span(1, 20), [ExtraKey(1, one), ExtraKey(9, two)])
        for one, two in ((b"cat", b"cat"), (b"dog", b"cat"), (b"cat", b"dog"))
    )
    assert [told(pool, asked) for asked in (same, first_differs, third_differs)] == [16, 0, 8]
    assert told(pool, prompt(span(1, 20))) == 0
    assert isinstance(waits(pool, first_differs), SequenceView)
    assert isinstance(waits(pool, third_differs), Awaited)


def test_only_what_could_be_reused_is_pending() -> None:
    """[W2] The bound of the match bounds it too: a cache that is bypassed has nobody to wait for."""
    pool = new_pool(64)
    allocate(pool, span(1, 20), session=1)
    assert [told(pool, prompt(span(1, 20)), most=most) for most in (0, 3, 11, 20)] == [0, 0, 8, 20]
    assert isinstance(finish(pool.allocate_unless_pending(2, prompt(span(1, 20)), max_cached_tokens=0)), SequenceView)


def test_a_match_that_is_too_short_to_use_is_worth_waiting_behind() -> None:
    """What others compute makes it longer."""
    pool = new_pool(64, min_reuse_tokens=12)
    writer = allocate(pool, span(1, 20), session=1)
    commit(pool, writer, 8)
    awaited = waits(pool, prompt(span(1, 20)))
    assert isinstance(awaited, Awaited)
    assert awaited.depth == 2
    commit(pool, writer, 20)
    assert pool.look_again(awaited) is Outlook.ARRIVED
    view = waits(pool, prompt(span(1, 20)))
    assert isinstance(view, SequenceView)
    assert view.cached_tokens == 16


def test_whoever_fills_a_warm_pin_is_waited_for() -> None:
    """[W1] A sequence of Warmup computes as any other."""
    pool = new_pool(64)
    warmed = finish(pool.warmup("t", 1, prompt(span(1, 16)), "pin"))
    assert warmed.sequence is not None
    awaited = waits(pool, prompt(span(1, 20)))
    assert isinstance(awaited, Awaited)
    commit(pool, warmed.sequence, 16)
    assert pool.drain_moved() == [awaited]
    assert pool.look_again(awaited) is Outlook.ARRIVED


def test_children_of_a_fork_are_writers_of_what_they_copied() -> None:
    """[W1] Each of what its parent had still to commit; the parent's release leaves them."""
    pool = new_pool(64)
    parent = allocate(pool, span(1, 20), session=1)
    made = finish(pool.fork(1, parent.number, 1))
    pool.finish_fork(made)
    pool.check_invariants()
    release(pool, parent)
    assert isinstance(waits(pool, prompt(span(1, 20))), Awaited)


def test_tokens_that_come_in_pieces_are_pending_as_they_come() -> None:
    """[W1] A prompt that grows by commits without being computed yet."""
    pool = new_pool(64)
    writer = allocate(pool, span(1, 2), session=1, reserve=20)
    assert told(pool, prompt(span(1, 20))) == 0
    finish(pool.commit(1, writer.number, Commit(0, encode(span(3, 13)))))
    assert told(pool, prompt(span(1, 20))) == 12


def test_of_two_long_prompts_that_are_matched_at_the_same_time_one_is_computed() -> None:
    """[W3] The step that admits the first makes it a writer, and that which would admit the second finds it."""
    pool = new_pool(256, slice_blocks=1)
    publish(pool, span(1, 40))
    asked = [pool.allocate_unless_pending(session, prompt(span(1, 80))) for session in (1, 2)]
    outcomes: list[SequenceView | Awaited] = []
    while asked:
        for steps in list(asked):
            try:
                next(steps)
            except StopIteration as stop:
                outcomes.append(stop.value)
                asked.remove(steps)
            pool.check_invariants()
    assert {type(outcome) for outcome in outcomes} == {SequenceView, Awaited}


def test_a_writer_that_comes_back_is_waited_for_again() -> None:
    """[W5] It had stalled; with its next commit it has not."""
    pool = new_pool(64)
    pool.tell_time(100.0)
    writer = allocate(pool, span(1, 20), session=1)
    pool.tell_time(100.0 + PATIENCE_S)
    view = finish(pool.allocate(2, prompt([*span(1, 8), 0]), max_cached_tokens=8))
    assert view.pending is not None
    assert (view.pending.token_count, view.pending.idle_s) == (8, PATIENCE_S)
    release(pool, view)
    assert isinstance(waits(pool, prompt(span(1, 20)), session=2), SequenceView)
    commit(pool, writer, 12)
    awaited = waits(pool, prompt([*span(1, 16), 0, 0]), session=2)
    assert isinstance(awaited, Awaited)
    assert (awaited.depth, awaited.stalls_at) == (3, 100.0 + 2 * PATIENCE_S)


def test_one_who_asks_does_not_look_at_its_own() -> None:
    """[G9] However many sequences of its own session begin alike, one look finds another's."""
    pool = new_pool(4096)
    for _ in range(500):
        allocate(pool, span(1, 8), session=1)
    ((_, sessions),) = pool._state.writers.by_key.items()
    assert list(sessions) == [1]
    other = allocate(pool, span(1, 8), session=2)
    assert other.pending is not None
    last = allocate(pool, span(1, 8), session=1)
    assert last.pending is not None
    assert last.pending.session == 2
