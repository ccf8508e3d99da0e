"""Continuous batching, and a name that a request has while another of that name is under way."""

import time
from collections.abc import Callable

import pytest

from batching_here import BLOCK_TOKENS, OTHER, PROMPTS, QUESTION, alone, answers, finished, greedy
from kvharbor.client import Pool
from kvharbor.engines.transformers_cb import continuous_batching, layout_for
from pool_sessions import PoolSessions
from pool_sessions import sessions as sessions
from tiny_models import decoder

PROMPT = PROMPTS[0]


@pytest.fixture
def open_pool(sessions: PoolSessions) -> Callable[..., Pool]:
    """Opens the model's pool in a session of its own."""
    return lambda: sessions.open(layout_for(decoder("Llama"), BLOCK_TOKENS), 60)


def wait_until_running(pool: Pool) -> None:
    until_s = time.monotonic() + 60
    while not pool.stats().reserved_block_count:
        assert time.monotonic() < until_s
        time.sleep(0.001)


@pytest.mark.parametrize("prompt", [[*QUESTION, *PROMPT], OTHER, PROMPT], ids=["longer", "shorter", "same"])
def test_a_second_request_of_a_name_fails_and_the_first_goes_on(
    open_pool: Callable[..., Pool], prompt: list[int]
) -> None:
    """They would share one table of blocks, and what the one has published the other would write over. [G2]"""
    model, pool = decoder("Llama"), open_pool()
    with continuous_batching(model, pool, greedy()) as engine:
        engine.add_request([*PROMPT], request_id="name", max_new_tokens=60)
        wait_until_running(pool)
        engine.add_request([*prompt], request_id="name", max_new_tokens=60)
        (refused,) = finished(engine, ["name"])
        assert "name is still under way" in (refused.error or "")
        (answered,) = finished(engine, ["name"])
        assert (answered.error, answered.generated_tokens) == (None, alone(model, PROMPT, 60))
        engine.add_request([*OTHER], request_id="name", max_new_tokens=5)
        (again,) = finished(engine, ["name"])
        assert again.generated_tokens == alone(model, OTHER, 5)
    with continuous_batching(decoder("Llama"), open_pool(), greedy()) as second:
        turn = [*PROMPT, *answered.generated_tokens]
        assert answers(second, [turn], 5) == [alone(model, turn, 5)]
        assert second.reuse.reused_tokens > 96
