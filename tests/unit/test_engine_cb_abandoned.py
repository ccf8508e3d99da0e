"""Continuous batching whose requests end before their prompts are computed: others are told. [E18]"""

import threading
from collections.abc import Callable
from typing import Any

from transformers import ContinuousBatchingConfig

from batching_here import BLOCK_TOKENS, DEADLINE_S, PROMPTS, answers, greedy
from kvharbor.engines.transformers_cb import continuous_batching
from tiny_models import decoder
from unit.test_engine_cb_epochs import EndingPool
from unit.test_engine_cb_epochs import pool_of as pool_of
from waiting import until

CHUNKS = ContinuousBatchingConfig(max_batch_tokens=2 * BLOCK_TOKENS)


class Halting:
    """A model that halts in a step until it is let go on."""

    def __init__(self, nth: int) -> None:
        self.model: Any = decoder("Llama")
        self.entered, self.goes_on = threading.Event(), threading.Event()
        self._steps = iter(range(nth))
        self.model.register_forward_pre_hook(self._step)

    def _step(self, *_: Any) -> None:
        if next(self._steps, None) is None and not self.entered.is_set():
            self.entered.set()
            assert self.goes_on.wait(DEADLINE_S)


def test_a_cancelled_prompt_is_given_up(pool_of: Callable[[int], EndingPool]) -> None:
    """After what the step under way has computed is published; what is answered is not given up."""
    pool: Any = pool_of(40)
    halting = Halting(1)
    with continuous_batching(halting.model, pool, greedy(), CHUNKS) as engine:
        (cancelled,) = engine.add_requests([[*PROMPTS[0]]], max_new_tokens=5)
        assert halting.entered.wait(DEADLINE_S)
        assert pool.blocks.marks
        engine.cancel_request(cancelled)
        halting.goes_on.set()
        until(lambda: not pool.blocks.marks)
        answers(engine, PROMPTS, 5)
        assert pool.blocks.calls.count("abandon") == 1
    assert pool.blocks.held() == []


def test_prompts_are_given_up_when_the_engine_stops(pool_of: Callable[[int], EndingPool]) -> None:
    """Whatever they had come to."""
    pool: Any = pool_of(40)
    halting = Halting(1)
    with continuous_batching(halting.model, pool, greedy(), CHUNKS) as engine:
        engine.add_requests([[*prompt] for prompt in PROMPTS], max_new_tokens=5)
        assert halting.entered.wait(DEADLINE_S)
        threading.Timer(0.0, halting.goes_on.set).start()
        engine.stop(block=True)
    assert not pool.blocks.marks
    assert pool.blocks.held() == []
