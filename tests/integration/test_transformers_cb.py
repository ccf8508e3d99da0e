"""transformers' continuous batching in a pool: the same answers as without, and every prefix computed once for all."""

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from batching_here import BLOCK_TOKENS, OTHER, PROMPTS, QUESTION, SYSTEM, alone, answers, finished, greedy
from kvharbor.client import Namespace, Pool, PoolStats
from kvharbor.engines.transformers import Worker
from kvharbor.engines.transformers_cb import PoolTaken, continuous_batching, layout_for
from pool_sessions import PoolSessions
from pool_sessions import sessions as sessions
from tiny_models import decoder

PROMPT = PROMPTS[0]
EXPECTED: dict[int, list[list[int]]] = {}


@pytest.fixture
def model() -> Any:
    """A small random Llama."""
    return decoder("Llama")


@pytest.fixture
def expected(model: Any) -> list[list[int]]:
    """What it says to each of PROMPTS."""
    if not EXPECTED:
        EXPECTED[0] = [alone(model, prompt, 20) for prompt in PROMPTS]
    return EXPECTED[0]


@pytest.fixture
def open_pool(sessions: PoolSessions, model: Any) -> Callable[..., Pool]:
    """Opens the model's pool in a session of its own."""
    return lambda block_count=60: sessions.open(layout_for(model, BLOCK_TOKENS), block_count)


def settled(pool: Pool) -> PoolStats:
    """The pool once the session has nothing under way; nothing is held then."""
    pool.blocks.flush()
    stats = pool.stats()
    assert (stats.reserved_block_count, stats.active_block_count, len(pool.own_blocks)) == (0, 0, 0)
    return stats


def test_a_prefix_is_computed_once_for_all_engines(
    open_pool: Callable[..., Pool], model: Any, expected: list[list[int]]
) -> None:
    """What one has computed another reuses, decoded tokens too, and both say what the model says alone."""
    first, second = open_pool(), open_pool()
    with continuous_batching(model, first, greedy()) as engine:
        assert answers(engine, [PROMPT]) == expected[:1]
        assert (engine.reuse.prompt_tokens, engine.reuse.reused_tokens) == (100, 0)
    with continuous_batching(decoder("Llama"), second, greedy()) as engine:
        assert answers(engine, PROMPTS) == expected
        assert (engine.reuse.prompt_tokens, engine.reuse.reused_tokens) == (312, 96 + 64)
        turn = [*PROMPT, *expected[0], *OTHER]
        assert answers(engine, [turn], 5) == [alone(model, turn, 5)]
        assert engine.reuse.reused_tokens == 96 + 64 + 112
    settled(second)


def test_nothing_is_there_for_others_before_its_step_has_run(open_pool: Callable[..., Pool], model: Any) -> None:
    """[P1] at the beginning of each step, what it is going to write is not published; after the first, most is."""
    pool = open_pool()
    present: list[int] = []

    def look(*_: Any) -> None:
        assert pool.blocks.computing.is_under_way, "[E17]"
        pool.blocks.flush()
        present.append(pool.lookup(PROMPT).present_tokens)

    model.register_forward_pre_hook(look)
    with continuous_batching(model, pool, greedy()) as engine:
        answers(engine, [PROMPT], 3)
    assert present == [0, 96, 96]
    assert not pool.blocks.computing.is_under_way


def test_the_engine_reads_what_lies_in_the_pool(
    open_pool: Callable[..., Pool], model: Any, expected: list[list[int]]
) -> None:
    """V of one layer overwritten: every engine says something else, and the same. Written back, the right thing."""
    first, second = open_pool(), open_pool()
    with continuous_batching(model, first, greedy()) as one, continuous_batching(model, second, greedy()) as two:
        assert answers(one, [PROMPT]) == expected[:1]
        pages = second.views.torch("v", 1)
        kept = pages.clone()
        pages[2:] += 1.5
        assert answers(two, [PROMPT]) != expected[:1]
        assert answers(one, [PROMPT]) == answers(two, [PROMPT])
        pages.copy_(kept)
        assert answers(two, [PROMPT]) == answers(one, [PROMPT]) == expected[:1]
        del pages


def test_a_worker_and_the_batching_engine_share(open_pool: Callable[..., Pool], model: Any) -> None:
    """Their layouts are the same, and so are their K and V: either takes up what the other has computed."""
    mine, theirs = open_pool(), open_pool()
    worker = Worker(decoder("Llama"), theirs)
    (made,) = worker.generate([PROMPT], 20)
    with continuous_batching(model, mine, greedy()) as engine:
        assert answers(engine, [PROMPT]) == [list(made.token_ids)]
        assert engine.reuse.reused_tokens == 96
        answers(engine, [OTHER + SYSTEM])
    (taken,) = worker.generate([OTHER + SYSTEM], 20)
    assert taken.reused_tokens == 80
    assert list(taken.token_ids) == alone(model, OTHER + SYSTEM, 20)
    settled(mine)


def test_namespaces_do_not_share(open_pool: Callable[..., Pool], model: Any) -> None:
    """[G8] another salt, another prefix."""
    pools = [open_pool() for _ in range(3)]
    for pool, salt, reused_tokens in zip(pools, (b"a", b"b", b"a"), (0, 0, 96), strict=True):
        with continuous_batching(model, pool, greedy(), namespace=Namespace(salt=salt)) as engine:
            answers(engine, [PROMPT])
            assert engine.reuse.reused_tokens == reused_tokens


@pytest.mark.parametrize("block_count", [11, 13, 16])
def test_a_full_pool_delays_answers_and_changes_none(
    block_count: int, open_pool: Callable[..., Pool], model: Any, expected: list[list[int]]
) -> None:
    """Room for the longest request and little more: requests give way, begin again, and say what they would have."""
    pool = open_pool(block_count)
    with continuous_batching(model, pool, greedy()) as engine:
        assert answers(engine, PROMPTS) == expected
        assert answers(engine, PROMPTS) == expected
    settled(pool)


@pytest.mark.slow
def test_engines_on_a_tight_pool_all_finish(sessions: PoolSessions) -> None:
    """Two engines, 80 prompts, and room for about one and a half: all finish, all texts are right, nothing is left."""
    models = [decoder("Llama") for _ in range(2)]
    pools = [sessions.open(layout_for(models[0], BLOCK_TOKENS), 14) for _ in range(2)]
    chosen = random.Random(5)
    prefixes = [[chosen.randrange(128) for _ in range(48)] for _ in range(4)]
    prompts = [chosen.choice(prefixes)[: chosen.randrange(20, 49)] + [chosen.randrange(128)] * 3 for _ in range(40)]
    wanted = {tuple(prompt): alone(models[0], prompt, 24) for prompt in prompts}
    said: dict[int, list[list[int]]] = {}

    def run(number: int) -> None:
        with continuous_batching(models[number], pools[number], greedy()) as engine:
            said[number] = answers(engine, prompts, 24)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [wanted[tuple(prompt)] for prompt in prompts]
    assert said == {0: expected, 1: expected}
    assert settled(pools[0]).counters.evicted_block_count > 20


@pytest.mark.parametrize("block_count", [60, 12])
def test_several_answers_share_one_prompt(
    block_count: int, open_pool: Callable[..., Pool], model: Any, expected: list[list[int]]
) -> None:
    """Forks share full blocks and have the rest copied; where there is no room they come later."""
    pool = open_pool(block_count)
    with continuous_batching(model, pool, greedy(answer_count=3)) as engine:
        (request_id,) = engine.add_requests([PROMPT], max_new_tokens=20)
        children = [f"{request_id}__child#{number}" for number in range(2)]
        outcomes = finished(engine, [request_id, *children])
        assert [outcome.generated_tokens for outcome in outcomes] == expected[:1] * 3
    settled(pool)


def test_what_never_fits_fails_alone(open_pool: Callable[..., Pool], model: Any, expected: list[list[int]]) -> None:
    """A prompt that the pool cannot hold, and one that is none, end with words; those beside them do not notice."""
    pool = open_pool(12)
    with continuous_batching(model, pool, greedy()) as engine:
        request_ids = engine.add_requests(
            [PROMPT, list(range(120)) * 2, [1] * 20 + [-1] * 20, OTHER], max_new_tokens=20
        )
        first, never, none, last = finished(engine, request_ids)
        assert "blocks" in never.error
        assert "tokens[20]" in none.error
        assert [first.generated_tokens, last.generated_tokens] == [expected[0], expected[2]]
    settled(pool)


def test_an_answer_that_outgrows_the_pool_fails_alone(open_pool: Callable[..., Pool], model: Any) -> None:
    """It gives way to nobody and begins again, until it does not fit at all."""
    pool = open_pool(8)
    with continuous_batching(model, pool, greedy()) as engine:
        (outcome,) = finished(engine, engine.add_requests([OTHER], max_new_tokens=200))
        assert outcome.error
        assert answers(engine, [QUESTION], 5) == [alone(model, QUESTION, 5)]
    settled(pool)


def test_a_cancelled_request_holds_nothing(open_pool: Callable[..., Pool], model: Any) -> None:
    """One that runs and one that waits for room."""
    pool = open_pool(12)
    with continuous_batching(model, pool, greedy()) as engine:
        running, waiting = engine.add_requests([PROMPT, QUESTION + SYSTEM], max_new_tokens=400)
        while not len(pool.own_blocks):
            assert engine.is_running()
        engine.cancel_request(waiting)
        engine.cancel_request(running)
        assert answers(engine, [OTHER], 5) == [alone(model, OTHER, 5)]
    settled(pool)


def test_an_idle_engine_holds_nothing(open_pool: Callable[..., Pool], model: Any) -> None:
    """Without a request to run even the blocks go back that were leased ahead."""
    pool = open_pool()
    with continuous_batching(model, pool, greedy()) as engine:
        answers(engine, PROMPTS)
        pool.blocks.flush()
        while pool.stats().reserved_block_count:
            assert engine.is_running()
        settled(pool)


def test_one_manager_of_a_pool_at_a_time(open_pool: Callable[..., Pool], model: Any) -> None:
    """Both would count the uses of the session's blocks, each without the other's. After the first, another may."""
    pool = open_pool()
    with (
        continuous_batching(model, pool, greedy()),
        pytest.raises(PoolTaken),
        continuous_batching(model, pool, greedy()),
    ):
        pass
    with continuous_batching(model, pool, greedy()) as engine:
        assert answers(engine, [OTHER], 3) == [alone(model, OTHER, 3)]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Two torch threads collapse when the second core is busy."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)
