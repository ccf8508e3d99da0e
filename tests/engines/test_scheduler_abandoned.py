"""Prompts that an engine gives up: others are told, and compute them at once [E18]."""

from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState

from engines.churn import Churn
from engines.scheduler_configs import BLOCK_TOKENS
from engines.scheduler_world import Engine, Mutation
from engines.test_scheduler_single_flight import KINDS, told
from engines.test_scheduler_single_flight import asks_in_every_step as asks_in_every_step
from kvharbor.client import CommitChain

pytestmark = pytest.mark.timeout(300)

TOKENS = [*range(246)]
"""In chunks of 64."""


def give_up(churn: Churn, engine: Engine, name: str) -> None:
    engine.abort(name)
    churn.aborted.add(name)


def told_count(engine: Engine) -> int:
    count: int = engine.calls.calls["abandon"]
    return count


def begin(*, asynchronous: bool, mutate: Mutation | None = None) -> tuple[Churn, Engine, Engine]:
    """One engine computes the second chunk of a prompt, and another stands back for it."""
    churn = told(asynchronous=asynchronous, mutate=mutate)
    first, second = churn.engines
    churn.ask("computes", first, TOKENS, 4)
    first.step()
    first.schedule()
    churn.ask("waits", second, TOKENS, 4)
    second.step()
    return churn, first, second


def abort_in_a_step(*, asynchronous: bool, mutate: Mutation | None = None) -> None:
    churn, first, second = begin(asynchronous=asynchronous, mutate=mutate)
    give_up(churn, first, "computes")
    second.step()
    assert "waits" not in second.cached
    while first.under_way:
        first.update()
    assert told_count(first) == 1
    assert not churn.owner.marks
    while "waits" not in second.cached:
        second.step()
    churn.drain()
    churn.check()
    assert second.cached["waits"] == 128
    assert told_count(first) == 1


def run_both(*, asynchronous: bool, other: list[int], mutate: Mutation | None = None) -> tuple[Churn, Engine]:
    """Two requests of one engine compute side by side."""
    churn = told(asynchronous=asynchronous, chunk_tokens=32, mutate=mutate)
    engine, _ = churn.engines
    churn.ask("one", engine, TOKENS, 4)
    engine.step()
    churn.ask("two", engine, other, 4)
    for _ in range(2):
        engine.step()
    assert len(engine.scheduler.running) == 2
    return churn, engine


def abort_one_of_two(*, asynchronous: bool, mutate: Mutation | None = None) -> None:
    churn, engine = run_both(asynchronous=asynchronous, other=TOKENS, mutate=mutate)
    give_up(churn, engine, "one")
    while engine.under_way:
        engine.update()
    assert churn.owner.marks
    assert told_count(engine) == 0
    give_up(churn, engine, "two")
    while engine.under_way:
        engine.update()
    assert told_count(engine) == 1
    assert not churn.owner.marks
    churn.drain()
    churn.check()


def pause_before_the_first_step(*, asynchronous: bool, mutate: Mutation | None = None) -> None:
    churn = told(asynchronous=asynchronous, mutate=mutate)
    engine, _ = churn.engines
    churn.ask("waits", engine, TOKENS, 4)
    engine.scheduler._admission.prepare(engine.scheduler)
    assert churn.owner.marks
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert not churn.owner.marks
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    churn.drain()
    churn.check()
    assert told_count(engine) == 1


def publish_elsewhere(churn: Churn, engine: Engine, name: str) -> None:
    """A session that does not stand back publishes first what a request of an engine can reuse."""
    request, other = engine.scheduler.requests[name], churn.owner.session()
    keys, content = b"".join(request.block_hashes), churn.world.content("", request.prompt_token_ids, 0)
    blocks = other.lease(len(request.block_hashes), len(request.block_hashes)).blocks
    for place, (block, _) in enumerate(blocks):
        for slot in range(BLOCK_TOKENS):
            churn.world.slots[block, slot] = content[place * BLOCK_TOKENS + slot]
    other.commit([CommitChain(blocks=blocks, keys=keys, namespace=engine.scheduler._admission.namespace)])
    other.close()


@KINDS
def test_what_is_found_to_be_published_already_is_not_computed_here(asynchronous: bool) -> None:
    """Another request acquires it, and to the one that was to compute it, it is all hits: nothing is to be told."""
    churn = told(asynchronous=asynchronous)
    engine, _ = churn.engines
    churn.ask("computes", engine, TOKENS[:40], 4)
    engine.scheduler._admission.prepare(engine.scheduler)
    publish_elsewhere(churn, engine, "computes")
    assert churn.owner.marks
    churn.ask("finds", engine, [*TOKENS[:40], 7], 4)
    engine.scheduler._admission.prepare(engine.scheduler)
    assert not churn.owner.marks
    churn.drain()
    churn.check()
    assert engine.cached["computes"] == 32
    assert told_count(engine) == 0


@KINDS
def test_what_is_under_way_of_it_is_published_first(asynchronous: bool) -> None:
    """Who stood back until then finds that, and computes the rest."""
    abort_in_a_step(asynchronous=asynchronous)


@KINDS
def test_another_request_that_computes_just_the_same_goes_on(asynchronous: bool) -> None:
    """Nothing is told until that is given up too."""
    abort_one_of_two(asynchronous=asynchronous)


@KINDS
def test_another_request_that_begins_alike_is_another_prompt(asynchronous: bool) -> None:
    churn, engine = run_both(asynchronous=asynchronous, other=TOKENS[:200] + [7] * 46)
    assert len(churn.owner.marks) == 2
    give_up(churn, engine, "one")
    while engine.under_way:
        engine.update()
    (left,) = churn.owner.marks
    assert left.keys[-1] == engine.scheduler.requests["two"].block_hashes[14]
    assert told_count(engine) == 1
    churn.drain()
    churn.check()


@KINDS
def test_a_prompt_that_is_computed_is_not_given_up(asynchronous: bool) -> None:
    """Not by its end, an abort while its last step is under way, nor one that comes later."""
    churn = told(asynchronous=asynchronous)
    first, _ = churn.engines
    for number, is_aborted in enumerate((False, True, True)):
        churn.ask(f"{number}", first, [number, *TOKENS], 4)
        for _ in range(3):
            first.step()
        step = first.schedule()
        assert step.rows[0].end == len(TOKENS) + 1
        if number == 2:
            first.update()
        if is_aborted:
            give_up(churn, first, f"{number}")
        churn.drain()
    churn.check()
    assert told_count(first) == 0


@KINDS
@pytest.mark.parametrize("is_full", [False, True])
def test_a_prompt_is_computed_with_its_last_whole_block(asynchronous: bool, is_full: bool) -> None:
    """Though a few tokens more of it are to come, and a step that begins and ends in a block needs no other."""
    churn = told(asynchronous=asynchronous)
    engine, _ = churn.engines
    engine.scheduler.max_num_scheduled_tokens = BLOCK_TOKENS // 2
    others = churn.owner.session()
    if is_full:
        others.lease(len(churn.owner.blocks) - 4, len(churn.owner.blocks) - 4)
    churn.ask("computes", engine, TOKENS[:40], 4)
    for _ in range(3):
        engine.step()
    assert engine.schedule().rows[0].end == 2 * BLOCK_TOKENS
    give_up(churn, engine, "computes")
    engine.update()
    assert not churn.owner.marks
    assert told_count(engine) == 0
    others.close()
    churn.drain()
    churn.check()


def test_the_last_of_two_steps_under_way_is_published_first() -> None:
    """Each of them goes on with the prompt."""
    churn = told(asynchronous=True)
    engine, _ = churn.engines
    churn.ask("computes", engine, TOKENS, 4)
    for _ in range(2):
        engine.schedule()
    give_up(churn, engine, "computes")
    for expected in (0, 1):
        assert told_count(engine) == 0
        engine.update()
        assert told_count(engine) == expected
    churn.drain()
    churn.check()


@KINDS
def test_who_has_not_begun_is_told_of_at_once(asynchronous: bool) -> None:
    """[E28] Such as by a pause; it is computed when that is over."""
    pause_before_the_first_step(asynchronous=asynchronous)


@KINDS
def test_who_is_given_up_before_it_has_begun_is_told_of_at_once(asynchronous: bool) -> None:
    """Also one that waits for room, and may have been granted it just now."""
    churn = told(asynchronous=asynchronous)
    engine, other = churn.engines
    churn.ask("fits", engine, TOKENS, 4)
    engine.scheduler._admission.prepare(engine.scheduler)
    give_up(churn, engine, "fits")
    assert not churn.owner.marks
    room = other.calls.lease(30, 30).blocks
    churn.ask("does not", engine, TOKENS, 4)
    engine.scheduler._admission.prepare(engine.scheduler)
    assert not churn.owner.marks
    other.calls.release(room)
    assert churn.owner.marks
    give_up(churn, engine, "does not")
    assert not churn.owner.marks
    churn.drain()
    churn.check()


@KINDS
def test_a_reset_gives_up_what_is_under_way_too(asynchronous: bool) -> None:
    """[E26] It is not published any more."""
    churn, first, _ = begin(asynchronous=asynchronous)
    churn.aborted.add("computes")  # its answer is of both weights
    first.take_weights(1, preempt=False)
    assert not churn.owner.marks
    churn.drain()
    churn.check()


def tells_nothing(scheduler: Any) -> None:
    scheduler._calls.abandon = lambda _: None
    scheduler._publication._announced._abandon = scheduler._calls.abandon


def sees_nobody_give_way(scheduler: Any) -> None:
    publication, look = scheduler._publication, scheduler._publication.look
    publication.look = lambda requests, _: look(requests, lambda _: True)


def tells_at_once(scheduler: Any) -> None:
    """While a step is under way that goes on with it."""
    scheduler._publication._last_step_of = lambda _: None


def looks_at_no_other_request(scheduler: Any) -> None:
    announced = scheduler._publication._announced
    announced.end = lambda name, *_, **__: name in announced.chains and announced._abandon([announced.chains.pop(name)])


@pytest.mark.parametrize(
    ("mutate", "does"),
    [
        (tells_nothing, abort_in_a_step),
        (sees_nobody_give_way, pause_before_the_first_step),
        (tells_at_once, abort_in_a_step),
        (looks_at_no_other_request, abort_one_of_two),
    ],
)
@KINDS
def test_what_is_not_so_is_noticed(mutate: Mutation, does: Callable[..., None], asynchronous: bool) -> None:
    with pytest.raises(AssertionError):
        does(asynchronous=asynchronous, mutate=mutate)
