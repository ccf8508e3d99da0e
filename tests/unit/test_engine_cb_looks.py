"""Continuous batching in which nothing can be computed: how soon the engine looks again. [W8]"""

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from batching_here import OTHER, greedy
from kvharbor.client import Acquired, Pending, PoolExhausted
from kvharbor.engines.transformers_cb import PooledManager, processor
from kvharbor.engines.transformers_cb.admissions import STAND_BACK_S
from tiny_models import decoder
from unit.test_engine_cb_epochs import EndingPool
from unit.test_engine_cb_epochs import pool_of as pool_of
from waiting import until

LOOKS = 4
ELSEWHERE = Acquired(pending=Pending(16, "another", 0.0), stands_back=True)
FULL = Acquired(refusal=PoolExhausted("full"))


class Loop(threading.Event):
    """What the engine's loop waits on, which remembers that."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[bool] = []
        """Whether it was woken before it waited."""
        self.naps_s: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(self.is_set())
        return super().wait(0.0 if self.is_set() else 0.01)

    def nap(self, duration_s: float) -> None:
        self.naps_s.append(duration_s)


LoopWith = Callable[..., Loop]


@pytest.fixture
def loop_with(pool_of: Callable[[int], EndingPool], monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopWith]:
    """Runs an engine with one request, which is told these things and then always the last one."""
    engines: list[PooledManager] = []

    def looked(*answers: Acquired) -> Loop:
        pool: Any = pool_of(12)
        left = [*answers]
        monkeypatch.setattr(pool.blocks, "acquire", lambda *_, **__: [left.pop(0) if len(left) > 1 else left[0]])
        engine, loop = PooledManager(decoder("Llama"), pool, greedy()), Loop()
        monkeypatch.setattr(processor, "time", SimpleNamespace(sleep=loop.nap))
        engine.add_requests([OTHER], 5)
        engine._wake_up_loop = loop
        engines.append(engine)
        engine.start()
        until(lambda: len(loop.waits) >= LOOKS)
        return loop

    yield looked
    for engine in engines:
        engine.stop(hard_stop=True)


def test_who_stands_back_is_looked_for_again_soon(loop_with: LoopWith) -> None:
    """After a short sleep, and not after the tenth of a second in which transformers looks for new requests."""
    loop = loop_with(ELSEWHERE)
    assert all(loop.waits)
    assert loop.naps_s[:LOOKS] == [STAND_BACK_S] * LOOKS


def test_who_waits_for_room_is_not(loop_with: LoopWith) -> None:
    """Its place in the queue is kept without that."""
    loop = loop_with(FULL)
    assert not any(loop.waits)
    assert not loop.naps_s


def test_nobody_is_looked_for_soon_once_nobody_stands_back(loop_with: LoopWith) -> None:
    """As of the last look."""
    loop = loop_with(ELSEWHERE, FULL)
    assert loop.waits[0]
    until(lambda: not loop.waits[-1])
