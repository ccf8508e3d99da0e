"""Continuous batching that is to stop: what can be computed is, and other engines are not waited for without end."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from transformers.generation.continuous_batching.continuous_api import BackgroundThreadStatus

from batching_here import DEADLINE_S, OTHER, PROMPTS, alone, finished, greedy
from fake_blocks import FakeCalls
from kvharbor.client import Acquired, BlockRun, Pending
from kvharbor.engines.transformers_cb import PooledManager
from kvharbor.engines.transformers_cb.processor import STOP_WAIT_S, PooledProcessor
from kvharbor.engines.transformers_cb.scheduler import GivingWay
from tiny_models import decoder
from unit.test_engine_cb_epochs import EndingPool
from unit.test_engine_cb_epochs import pool_of as pool_of
from waiting import until

MODEL = decoder("Llama")
ELSEWHERE = Acquired(pending=Pending(16, "another", 0.0), stands_back=True)


class Stopping:
    """An engine with requests that wait for others, and the thread that stops it; `now_s` is the engine's clock."""

    def __init__(self, pool: Any) -> None:
        self.now_s = 5.0
        self.looked_count = 0
        self.engine = PooledManager(MODEL, pool, greedy())
        self.thread = threading.Thread()
        self.engine.start()

    def ask(self) -> list[str]:
        """Asks for two answers."""
        return [name for prompt in (PROMPTS[0], OTHER) for name in self.engine.add_requests([[*prompt]], 5)]

    def stop(self, **how: bool) -> None:
        """Returns when the engine knows that it is to stop, and has found that it waits."""
        self.thread = threading.Thread(target=self.engine.stop, kwargs=how)
        self.thread.start()
        status = self.engine.background_thread_status
        until(lambda: status.tp_status == BackgroundThreadStatus.FLUSH_AND_STOP)
        self.let_it_look()

    def let_it_look(self) -> None:
        """Returns when the engine has looked at its clock since."""
        looked_count = self.looked_count
        until(lambda: self.looked_count > looked_count + 1 or not self.engine.is_running())

    def clock(self) -> float:
        self.looked_count += 1
        return self.now_s


@pytest.fixture
def engine_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], Stopping]]:
    """Starts one on a pool; it ends with the test, whatever becomes of that."""
    made: list[Stopping] = []

    def start(pool: Any) -> Stopping:
        made.append(Stopping(pool))
        monkeypatch.setattr(PooledProcessor, "clock", made[-1].clock)
        return made[-1]

    yield start
    for each in made:
        each.engine.stop(hard_stop=True)


@pytest.fixture
def taken(pool_of: Callable[[int], EndingPool]) -> Iterator[tuple[EndingPool, FakeCalls, BlockRun]]:
    """A pool of which another session has leased everything."""
    pool = pool_of(12)
    other = pool.owners[0].session()
    yield pool, other, other.lease(10, 10).blocks
    assert pool.blocks.held() == []
    assert not pool.owners[0].waiting


Taken = tuple[EndingPool, FakeCalls, BlockRun]
EngineOn = Callable[[Any], Stopping]


def waits(pool: EndingPool) -> None:
    """Returns when a request stands in the owner's queue."""
    until(lambda: bool(pool.owners[0].waiting))


def test_prompts_without_room_keep_no_engine_from_stopping(engine_on: EngineOn, taken: Taken) -> None:
    """They fail with words, the first and those behind it, after a time in which there could have been room."""
    pool, _, _ = taken
    stopping = engine_on(pool)
    asked = stopping.ask()
    waits(pool)
    stopping.stop()
    stopping.now_s += STOP_WAIT_S - 0.5
    stopping.let_it_look()
    assert stopping.engine.is_running()
    stopping.now_s += 0.5
    stopping.thread.join(DEADLINE_S)
    assert all("other engines" in outcome.error for outcome in finished(stopping.engine, asked))


def test_a_prompt_that_another_engine_computes_keeps_none_from_stopping(
    engine_on: EngineOn, pool_of: Callable[[int], EndingPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """[W8] However well that one gets on with it."""
    pool: Any = pool_of(12)
    monkeypatch.setattr(pool.blocks, "acquire", lambda *_, **__: [ELSEWHERE])
    stopping = engine_on(pool)
    asked = stopping.ask()
    processor: Any = until(lambda: stopping.engine.batch_processor)
    stopping.stop()
    stopping.now_s += STOP_WAIT_S
    stopping.thread.join(DEADLINE_S)
    assert all("other engines" in outcome.error for outcome in finished(stopping.engine, asked))
    assert not processor.cache.admissions._standing_back


def test_what_waits_is_answered_where_there_is_room_in_time(engine_on: EngineOn, taken: Taken) -> None:
    """By an engine that stops, too; until then it may wait for as long as it likes."""
    pool, other, room = taken
    stopping = engine_on(pool)
    asked = stopping.ask()
    waits(pool)
    processor: Any = until(lambda: stopping.engine.batch_processor)
    for _ in range(2):  # each is taken in by a step of its own
        (behind,) = stopping.engine.add_requests([[*OTHER]], 5)
        until(lambda name=behind: name in processor.scheduler.waiting_requests)  # type: ignore[misc]
        stopping.engine.cancel_request(behind)
        stopping.now_s += 2 * STOP_WAIT_S
    stopping.stop()
    stopping.now_s += STOP_WAIT_S - 0.5
    other.release(room)
    stopping.thread.join(DEADLINE_S)
    outcomes = finished(stopping.engine, asked)
    assert [outcome.generated_tokens for outcome in outcomes] == [alone(MODEL, each, 5) for each in (PROMPTS[0], OTHER)]


def test_only_what_waits_counts_as_waiting(
    engine_on: EngineOn, pool_of: Callable[[int], EndingPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is computed for longer than others are waited for is answered, though it lacks room for a moment."""
    pool: Any = pool_of(12)
    acquire, is_elsewhere, computed, lacking = pool.blocks.acquire, [True], [0], [True]
    prepare, schedule = PooledProcessor.prepare_next_batch, GivingWay.schedule_batch
    stopping = engine_on(pool)

    def prepared(processor: PooledProcessor) -> bool:
        ready = prepare(processor)
        computed[0] += ready
        stopping.now_s += ready * STOP_WAIT_S / 4
        return ready

    def scheduled(scheduler: GivingWay, *budgets: int) -> Any:
        if computed[0] == 5 and lacking:
            lacking.clear()
            return [], False, 0, 0
        return schedule(scheduler, *budgets)

    monkeypatch.setattr(pool.blocks, "acquire", lambda *a, **k: [ELSEWHERE] if is_elsewhere else acquire(*a, **k))
    monkeypatch.setattr(PooledProcessor, "prepare_next_batch", prepared)
    monkeypatch.setattr(GivingWay, "schedule_batch", scheduled)
    asked = stopping.engine.add_requests([[*PROMPTS[0]]], 8)
    until(lambda: stopping.engine.batch_processor)
    stopping.stop()
    is_elsewhere.clear()
    stopping.thread.join(DEADLINE_S)
    (outcome,) = finished(stopping.engine, asked)
    assert (outcome.generated_tokens, lacking) == (alone(MODEL, PROMPTS[0], 8), [])


def test_the_time_begins_anew_with_the_next_stop(engine_on: EngineOn, taken: Taken) -> None:
    """Of an engine that is kept and started again."""
    pool, other, room = taken
    stopping = engine_on(pool)
    failed = stopping.ask()
    waits(pool)
    stopping.stop(keep_for_next_session=True)
    stopping.now_s += STOP_WAIT_S
    stopping.thread.join(DEADLINE_S)
    assert all(outcome.error for outcome in finished(stopping.engine, failed))
    stopping.engine.start()
    asked = stopping.ask()
    waits(pool)
    stopping.stop()
    other.release(room)
    stopping.thread.join(DEADLINE_S)
    assert [outcome.error for outcome in finished(stopping.engine, asked)] == [None, None]


def test_an_engine_that_is_kept_learns_of_a_new_epoch(
    engine_on: EngineOn, pool_of: Callable[[int], EndingPool]
) -> None:
    """What it has not been able to give back is void."""
    engine = engine_on(pool_of(12)).engine
    until(lambda: engine.batch_processor)
    engine.stop(keep_for_next_session=True)
    engine.on_epoch("old", "new")
    assert engine.batch_processor is not None
    assert engine.batch_processor.cache.held.epoch_ended
    engine.start()
    engine.stop()


def test_an_engine_that_is_not_waited_for_learns_of_a_new_epoch(
    engine_on: EngineOn, pool_of: Callable[[int], EndingPool]
) -> None:
    """And asks anew, as nobody knows its place in the queue any more."""
    pool = pool_of(12)
    pool.owners[0].session().lease(10, 10)
    stopping = engine_on(pool)
    stopping.ask()
    waits(pool)
    stopping.engine.stop(block=False)
    asked_count = pool.blocks.calls.count("acquire")
    stopping.engine.on_epoch("old", "new")
    until(lambda: pool.blocks.calls.count("acquire") > asked_count)
    stopping.engine.stop(hard_stop=True)


def test_who_does_not_wait_for_the_end_leaves_nothing(engine_on: EngineOn, taken: Taken) -> None:
    """[E14] Though transformers forgets the processor at once, which is still at work."""
    pool, _, _ = taken
    stopping = engine_on(pool)
    stopping.ask()
    waits(pool)
    stopping.engine.stop(block=False, hard_stop=True)
    until(lambda: not stopping.engine.is_running())
