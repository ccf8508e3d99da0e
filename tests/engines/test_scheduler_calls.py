"""What a step asks of the service: one question for all who may enter, and nothing where nobody does."""

from typing import Any

import pytest

from engines.churn import Churn
from engines.scheduler_configs import BLOCK_TOKENS

pytestmark = pytest.mark.timeout(300)

KINDS = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


def calls_by_step(engine: Any, step_count: int) -> list[dict[str, int]]:
    """Returns which calls each of the next steps makes, and how often."""
    made = []
    for _ in range(step_count):
        before = {**engine.calls.calls}
        engine.step()
        made.append({name: count - before[name] for name, count in engine.calls.calls.items() if count != before[name]})
    return made


def decode(*, asynchronous: bool, block_count: int = 40) -> tuple[Churn, list[dict[str, int]]]:
    """Three prompts of a block and a bit are answered at once, with a block each that fills on the way."""
    churn = Churn(asynchronous=asynchronous, seed=1, block_count=block_count)
    (engine, _) = churn.engines
    for number in range(3):
        churn.ask(f"r{number}", engine, [number * 50 + token for token in range(BLOCK_TOKENS + 3)], 2 * BLOCK_TOKENS)
    return churn, calls_by_step(engine, 2 * BLOCK_TOKENS - 4)


@KINDS
def test_all_who_may_enter_are_asked_for_at_once(asynchronous: bool) -> None:
    """One round trip for three; their whole blocks are published together."""
    churn, steps = decode(asynchronous=asynchronous)
    assert sum(step.get("acquire", 0) for step in steps) == 1
    assert steps[0]["acquire"] == 1
    churn.drain()
    churn.check()


@KINDS
def test_decode_steps_wait_for_nothing(asynchronous: bool) -> None:
    """E27: not even the first behind an admission, nor where blocks fill up; most steps tell the service nothing."""
    churn, steps = decode(asynchronous=asynchronous)
    assert not any("lease" in step for step in steps)
    told = [step for step in steps if step]
    assert len(told) <= 4, steps
    assert all(step.keys() <= {"acquire", "commit"} for step in told)
    churn.drain()
    churn.check()


@KINDS
@pytest.mark.parametrize("another_fails", [False, True])
def test_the_last_block_of_an_answer_is_published(asynchronous: bool, another_fails: bool) -> None:
    """Where steps overlap vLLM takes it in as the request ends; nothing before it goes back before that is told."""
    churn = Churn(asynchronous=asynchronous, seed=1)
    (engine, _) = churn.engines
    count = BLOCK_TOKENS - 3
    churn.ask("r", engine, [*range(BLOCK_TOKENS + 4)], count)
    churn.ask("fails", engine, [7], 2 * BLOCK_TOKENS)
    churn.aborted.add("fails")
    while "r" in engine.scheduler.requests:
        while engine.may_schedule:
            engine.schedule()
        if another_fails and len(engine.answers["r"]) == count - 1:
            engine.scheduler.encoder_cache_mismatch_reqs.add("fails")
        engine.update()
    assert another_fails == ("fails" not in engine.scheduler.requests)
    churn.drain()
    churn.ask("goes on", engine, engine.tokens["r"], 4)
    churn.drain()
    churn.check()
    assert engine.cached["goes on"] == 2 * BLOCK_TOKENS


def has_no_store(scheduler: Any) -> None:
    scheduler._room._make_store = lambda: None


def keeps_its_store(scheduler: Any) -> None:
    make_store = scheduler._room._make_store

    def made() -> Any:
        store = make_store()
        store.rest = lambda: None
        return store

    scheduler._room._make_store = made


@KINDS
def test_an_engine_without_a_store_has_to_ask(asynchronous: bool) -> None:
    """In a decode step: the test above would see it."""
    churn = Churn(asynchronous=asynchronous, seed=1, mutate=has_no_store)
    (engine, _) = churn.engines
    churn.ask("r", engine, [*range(BLOCK_TOKENS - 3)], 2 * BLOCK_TOKENS)
    steps = calls_by_step(engine, 2 * BLOCK_TOKENS - 4)
    assert not any("lease" in step for step in steps[:4]), "the spare block of the admission"
    assert any("lease" in step for step in steps)


@KINDS
def test_no_spare_block_is_asked_for_where_there_is_none(asynchronous: bool) -> None:
    """A request that needs all there is is admitted at once."""
    churn = Churn(asynchronous=asynchronous, seed=1, block_count=17)
    (engine, _) = churn.engines
    churn.ask("all", engine, [*range(16 * BLOCK_TOKENS - 3)], 2)
    engine.step()
    assert engine.scheduler.running
    churn.drain()
    churn.check()


def test_a_store_that_is_kept_when_nothing_runs() -> None:
    """E14: its blocks are still held in the end."""
    churn = Churn(asynchronous=False, seed=1, mutate=keeps_its_store)
    churn.ask("r", churn.engines[0], [*range(20)], 2 * BLOCK_TOKENS)
    churn.drain()
    with pytest.raises(AssertionError):
        churn.check()
