"""Steps in which nothing changes but what runs: little is looked at, and others' wants are seen all the same."""

from typing import Any

import pytest

from engines.churn import Churn
from engines.scheduler_configs import BLOCK_TOKENS
from engines.scheduler_world import Mutation
from kvharbor.client import PoolExhausted

pytestmark = pytest.mark.timeout(300)

KINDS = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


def looked_after(engine: Any) -> list[int]:
    """Counts, from now on, the steps in which an engine looks after those who wait."""
    prepare, counted = engine.scheduler._admission.prepare, [0]

    def counting(scheduler: Any) -> None:
        counted[0] += 1
        prepare(scheduler)

    engine.scheduler._admission.prepare = counting
    return counted


def decoding(*, asynchronous: bool, mutate: Mutation | None = None) -> Churn:
    """One request is in the middle of a block."""
    churn = Churn(asynchronous=asynchronous, seed=1, mutate=mutate)
    churn.ask("r", churn.engines[0], [*range(BLOCK_TOKENS + 3)], 2 * BLOCK_TOKENS)
    for _ in range(4):
        churn.engines[0].step()
    return churn


@KINDS
def test_a_step_that_only_decodes_looks_after_nobody(asynchronous: bool) -> None:
    """E29: but for those around a block that fills up."""
    churn = decoding(asynchronous=asynchronous)
    counted = looked_after(churn.engines[0])
    for _ in range(BLOCK_TOKENS):
        churn.engines[0].step()
    assert counted[0] <= 3
    churn.drain()
    churn.check()


@KINDS
def test_a_session_between_two_inputs_does_not_disturb_the_calm(asynchronous: bool) -> None:
    """E29: it holds blocks, and needs nothing until its input comes."""
    churn = Churn(asynchronous=asynchronous, seed=1)
    engine = churn.engines[0]
    engine.add("session", [*range(200, 203)], 3, resumable=True)
    while len(engine.answers["session"]) < 3 or engine.under_way:
        engine.step()
    churn.ask("r", engine, [*range(BLOCK_TOKENS + 3)], 2 * BLOCK_TOKENS)
    for _ in range(4):
        engine.step()
    counted = looked_after(engine)
    for _ in range(BLOCK_TOKENS):
        engine.step()
    assert counted[0] <= 3
    engine.go_on("session", [*range(300, 300 + 2 * BLOCK_TOKENS)], 3)
    assert "session" in {row.request_id for row in engine.schedule().rows}
    engine.abort("session")
    churn.drain()
    churn.check()


def others_get_what_is_spare(*, asynchronous: bool, mutate: Mutation | None = None) -> None:
    """Another engine needs all that is left, the spare block too, while steps are calm."""
    churn = decoding(asynchronous=asynchronous, mutate=mutate)
    engine, other = churn.engines
    used = len(engine.scheduler.kv_cache_manager.get_block_ids("r")[0])
    assert engine.scheduler._room.free_count == 1
    others = len(churn.owner.blocks) - 1 - used
    with pytest.raises(PoolExhausted):
        other.calls.lease(others, others)
    engine.schedule()
    leased = other.calls.lease(others, others)
    other.calls.release(leased.blocks)
    churn.drain()
    churn.check()


@KINDS
def test_a_recall_ends_the_calm(asynchronous: bool) -> None:
    """E14: what is spare goes back as the next step is scheduled, before it runs."""
    others_get_what_is_spare(asynchronous=asynchronous)


def sees_no_recalls(scheduler: Any) -> None:
    room = scheduler._room
    room.is_settled = lambda running_count: bool(running_count) and room.free_count == 1


def test_a_calm_that_sees_no_recalls() -> None:
    """The other engine would wait."""
    with pytest.raises(PoolExhausted):
        others_get_what_is_spare(asynchronous=False, mutate=sees_no_recalls)
