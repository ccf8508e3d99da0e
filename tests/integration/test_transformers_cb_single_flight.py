"""Continuous batching where engines are asked for one prefix at once: one computes, the others stand back [W8]."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from batching_here import BLOCK_TOKENS, DEADLINE_S, OTHER, PROMPTS, QUESTION, SYSTEM, alone, answers, finished, greedy
from kvharbor.client import Chain, Harbor, Pool, connect
from kvharbor.engines.transformers_cb import PooledManager, continuous_batching, layout_for
from pool_sessions import PoolSessions
from pool_sessions import sessions as sessions
from tiny_models import decoder
from waiting import until

PROMPT = PROMPTS[0]
SHARED_TOKENS = len(PROMPT) // BLOCK_TOKENS * BLOCK_TOKENS
# Weights are drawn at random, so that none may be made while an engine runs.
MODEL = decoder("Llama")
LAYOUT = layout_for(MODEL, BLOCK_TOKENS)
COMPUTED = Chain(tokens=PROMPT[:SHARED_TOKENS], table_block_count=7, computes=True)


class Gate:
    """A model whose first step waits until it is let go on."""

    def __init__(self) -> None:
        self.model: Any = decoder("Llama")
        self.entered, self.goes_on = threading.Event(), threading.Event()
        self.model.register_forward_pre_hook(self._wait)

    def _wait(self, *_: Any) -> None:
        self.entered.set()
        assert self.goes_on.wait(DEADLINE_S)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two torch threads collapse when the second core is busy."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


@pytest.fixture
def open_pool(sessions: PoolSessions) -> Callable[..., Pool]:
    """Opens the model's pool in a session of its own."""
    return lambda block_count=60: sessions.open(LAYOUT, block_count)


def ask(manager: PooledManager, prompt: list[int], new_tokens: int = 5) -> str:
    """Asks without waiting."""
    (request_id,) = manager.add_requests([prompt], max_new_tokens=new_tokens)
    return str(request_id)


def stands_back(manager: PooledManager, request_id: str) -> bool:
    """Whether a request waits for what another engine computes."""
    processor = manager.batch_processor
    return processor is not None and request_id in processor.cache.admissions._standing_back


def counted(pool: Pool) -> tuple[int, int, int]:
    """Requests, and prompt tokens in all and reused, of every engine."""
    counters = pool.stats().counters
    return counters.allocate_count, counters.prompt_token_count, counters.reused_token_count


def test_who_is_asked_for_what_another_computes_waits_and_computes_the_rest(open_pool: Callable[..., Pool]) -> None:
    """It holds nothing for it, goes on with others, and each request counts once."""
    gate = Gate()
    first, second = open_pool(), open_pool()
    with continuous_batching(gate.model, first, greedy()) as one, continuous_batching(MODEL, second, greedy()) as two:
        computing = ask(one, PROMPT)
        assert gate.entered.wait(DEADLINE_S)
        waiting = ask(two, [*PROMPT[:SHARED_TOKENS], *OTHER])
        until(lambda: stands_back(two, waiting))
        assert answers(two, [OTHER], 5) == [alone(MODEL, OTHER, 5)]
        until(lambda: not len(second.own_blocks))
        assert stands_back(two, waiting)
        gate.goes_on.set()
        outcomes = [*finished(one, [computing]), *finished(two, [waiting])]
        assert [outcome.generated_tokens for outcome in outcomes] == [
            alone(MODEL, prompt, 5) for prompt in (PROMPT, [*PROMPT[:SHARED_TOKENS], *OTHER])
        ]
        assert two.reuse.reused_tokens == SHARED_TOKENS
    second.blocks.flush()
    assert counted(first) == (3, 2 * SHARED_TOKENS + 2 * BLOCK_TOKENS, SHARED_TOKENS)
    assert first.stats().counters.shadow_block_count == 0


def test_engines_that_wait_for_each_other_both_go_on(open_pool: Callable[..., Pool]) -> None:
    """Each computes what the other stands back for."""
    gates, prompts = [Gate(), Gate()], [SYSTEM, QUESTION]
    pools = [open_pool(), open_pool()]
    with contextlib.ExitStack() as stack:
        managers = [
            stack.enter_context(continuous_batching(gate.model, pool, greedy()))
            for gate, pool in zip(gates, pools, strict=True)
        ]
        asked = [[ask(manager, prompt, 2)] for manager, prompt in zip(managers, prompts, strict=True)]
        for gate in gates:
            assert gate.entered.wait(DEADLINE_S)
        for manager, names, prompt in zip(managers, asked, reversed(prompts), strict=True):
            names.append(ask(manager, prompt, 2))
        for gate in gates:
            gate.goes_on.set()
        for manager, names, order in zip(managers, asked, (prompts, prompts[::-1]), strict=True):
            said = [outcome.generated_tokens for outcome in finished(manager, names)]
            assert said == [alone(MODEL, prompt, 2) for prompt in order]
    pools[0].blocks.flush()
    assert pools[0].stats().counters.shadow_block_count == 0
    assert sum(manager.reuse.reused_tokens for manager in managers) == 64 + 16


def test_prompts_that_both_are_asked_at_once_are_computed_once(open_pool: Callable[..., Pool]) -> None:
    """In whatever order; no block of them is written twice, and each request counts once."""
    prompts = [[first] * 64 + OTHER[:5] for first in range(1, 9)]
    pools = [open_pool(), open_pool()]
    expected = [alone(MODEL, prompt, 5) for prompt in prompts]
    models = [MODEL, decoder("Llama")]
    with contextlib.ExitStack() as stack:
        managers = [
            stack.enter_context(continuous_batching(model, pool, greedy()))
            for model, pool in zip(models, pools, strict=True)
        ]
        said: dict[int, list[list[int]]] = {}
        threads = [
            threading.Thread(target=lambda number=number: said.update({number: answers(managers[number], prompts, 5)}))
            for number in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert said == {0: expected, 1: expected}
    for pool in pools:
        pool.blocks.flush()
    assert counted(pools[0]) == (16, 16 * 64, 8 * 64)
    assert pools[0].stats().counters.shadow_block_count == 0


@pytest.fixture
def writer(open_pool: Callable[..., Pool], harbor: str) -> Iterator[tuple[Harbor, Pool]]:
    """A session that says it is in a step which computes PROMPT, and its pool."""
    name = open_pool().name
    with connect(harbor) as session:
        pool = session.open_pool(name, LAYOUT)
        pool.blocks.computing.begin()
        pool.blocks.acquire([COMPUTED])
        yield session, pool


ENDS: dict[str, Callable[[Harbor, Pool], object]] = {
    "died": lambda harbor, _: harbor.close(),
    "stalled": lambda _, pool: pool.blocks.computing.end(),
    "gave it up": lambda _, pool: pool.blocks.abandon([COMPUTED]),
}


@pytest.mark.parametrize("end", ENDS)
def test_who_waits_takes_over(end: str, writer: tuple[Harbor, Pool], open_pool: Callable[..., Pool]) -> None:
    """[W5] [B8] Where the other session ends, gives no sign for two seconds, or is at work on something else."""
    pool = open_pool()
    with continuous_batching(MODEL, pool, greedy()) as engine:
        waiting = ask(engine, PROMPT)
        until(lambda: stands_back(engine, waiting))
        ENDS[end](*writer)
        (outcome,) = finished(engine, [waiting])
        assert outcome.generated_tokens == alone(MODEL, PROMPT, 5)
        assert engine.reuse.reused_tokens == 0


@pytest.mark.usefixtures("writer")
def test_who_waits_may_be_cancelled(open_pool: Callable[..., Pool]) -> None:
    """And is forgotten; the engine looks no more for anybody."""
    pool = open_pool()
    with continuous_batching(MODEL, pool, greedy()) as engine:
        waiting = ask(engine, PROMPT)
        until(lambda: stands_back(engine, waiting))
        engine.cancel_request(waiting)
        until(lambda: not stands_back(engine, waiting))
        assert answers(engine, [OTHER], 5) == [alone(MODEL, OTHER, 5)]
        processor: Any = engine.batch_processor
        until(lambda: not processor.cache.admissions.any_stood_back)


def test_who_has_waited_for_room_counts_once(open_pool: Callable[..., Pool]) -> None:
    """[E13] What it was granted is asked for once more, and that is no request."""
    other, pool = open_pool(14), open_pool(14)
    room = other.blocks.lease(8, 8).blocks
    with continuous_batching(MODEL, pool, greedy()) as engine:
        waiting = ask(engine, PROMPT)
        until(lambda: other.stats().waiting_count)
        other.blocks.release(room)
        (outcome,) = finished(engine, [waiting])
        assert outcome.generated_tokens == alone(MODEL, PROMPT, 5)
    assert counted(other) == (1, SHARED_TOKENS, 0)
