"""Real vLLM engines on one pool, with a real model and a real service.

Tests come in any order: a prompt that has to be cold begins as no other does.
"""

from typing import Any

import pytest

from engines.conftest import StartEngine
from engines.pool_here import LIBRARY, MUSEUM, opened, pool_blocks, settled
from service_process import ServiceProcess

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(600)]


@pytest.mark.short
def test_the_second_engine_begins_warm_and_says_what_a_plain_one_does(
    engines: tuple[Any, Any, Any], engine_service: ServiceProcess
) -> None:
    """Cached tokens are as vLLM itself reports them, KV lies in the pool once, nothing stays held."""
    first, second, plain = engines
    question = "Tell a visitor. " + MUSEUM * 2 + "When does it open?"
    alone = plain.answer(question, max_tokens=70)
    made = [engine.answer(question, max_tokens=70) for engine in (first, second)]
    assert [each["token_ids"] for each in made] == [alone["token_ids"]] * 2
    whole_blocks = (alone["prompt_tokens"] - 1) // 64
    assert whole_blocks >= 3
    assert [each["cached_tokens"] for each in made] == [0, whole_blocks * 64]
    follow_up = question + made[0]["texts"][0] + " And when does it close?"
    expected = plain.answer(follow_up, max_tokens=20)
    for engine in (second, first):
        answer = engine.answer(follow_up, max_tokens=20)
        assert answer["token_ids"] == expected["token_ids"]
        assert answer["cached_tokens"] > whole_blocks * 64
    assert [engine.ask("standing")["held"] for engine in (first, second)] == [0, 0]
    with opened(engine_service) as pool:
        stats = settled(pool)
        assert stats.total_block_count == stats.cached_block_count + stats.free_block_count
        shared = {
            (one.engine.name, stats.engines[reuse.engine_index].engine.name)
            for place, one in enumerate(stats.engines)
            for reuse in one.reuses
            if reuse.engine_index != place
        }
    # Each has reused of the other [U2]; and of the process before, where another test has ended that.
    assert ("vllm", "vllm") in shared
    assert shared <= {("vllm", "vllm"), ("vllm", "")}


def test_a_decode_step_makes_no_call(engines: tuple[Any, Any, Any]) -> None:
    """One for admission, and at most one for room while the store of blocks is not filled yet: 3 blocks fill up."""
    first, _, _ = engines
    before = first.ask("standing")
    first.answer("What do visitors like best in " + LIBRARY, max_tokens=200)
    after = first.ask("standing")
    assert after["steps"] - before["steps"] >= 200
    assert after["acquire"] - before["acquire"] == 1
    assert after["lease"] - before["lease"] <= 1


@pytest.mark.short
def test_blocks_that_are_overwritten_change_what_both_engines_say(
    engines: tuple[Any, Any, Any], engine_service: ServiceProcess
) -> None:
    """They read the pool, and no copy of their own."""
    first, second, plain = engines
    question = MUSEUM + "What is in the second hall?"
    right = plain.answer(question, max_tokens=12)["token_ids"]
    assert first.answer(question, max_tokens=12)["token_ids"] == right
    with opened(engine_service) as pool:
        settled(pool)
        layers = range(pool.descriptor.layout.planes[0].layer_count)
        pages = [pool.views.page("kv", layer, block) for layer in layers for block in range(1, pool_blocks(pool))]
        before = [page.copy() for page in pages]
        for page in pages:
            page.view("float32")[:] = 0.5
        wrong = [engine.answer(question, max_tokens=12) for engine in (first, second)]
        for page, bytes_before in zip(pages, before, strict=True):
            page[:] = bytes_before
        del page, pages
    assert all(answer["cached_tokens"] > 0 and answer["token_ids"] != right for answer in wrong)
    assert [engine.answer(question, max_tokens=12)["token_ids"] for engine in (first, second)] == [right, right]


def test_salts_never_cross(engines: tuple[Any, Any, Any]) -> None:
    """A prompt is a hit under its own salt only."""
    first, second, _ = engines
    question = "In private. " + LIBRARY + "Where do dogs wait?"
    cached = [
        engine.answer(question, max_tokens=4, salt=salt)["cached_tokens"]
        for engine, salt in ((first, "one"), (second, "two"), (second, ""), (second, "one"), (first, "two"))
    ]
    assert cached[:3] == [0, 0, 0]
    assert cached[3] == cached[4] > 0


def test_many_requests_of_both_engines_in_a_small_pool(engines: tuple[Any, Any, Any]) -> None:
    """Nobody starves, and each answer is as without a cache: 19 blocks, of which one request needs 9."""
    first, second, plain = engines
    prompts = [
        f"{(MUSEUM, LIBRARY)[number % 2] * (1 + number % 3)}Question {number // 2}: what may visitors board?"
        for number in range(8)
    ]
    longest = MUSEUM * 5 + "What is shown?"
    first.send("generate", prompts=[longest, *prompts], max_tokens=16)
    second.send("generate", prompts=[*prompts, longest], max_tokens=16)
    own = [engine.reply()["answers"] for engine in (first, second)]
    alone = plain.answers([longest, *prompts], max_tokens=16)
    assert -(-(alone[0]["prompt_tokens"] + 16) // 64) >= 9
    expected = [answer["token_ids"] for answer in alone]
    assert [answer["token_ids"] for answer in own[0]] == expected
    assert [answer["token_ids"] for answer in own[1]] == [*expected[1:], expected[0]]
    assert [engine.ask("standing")["held"] for engine in (first, second)] == [0, 0]


def test_several_answers_to_one_prompt(engines: tuple[Any, Any, Any]) -> None:
    """n > 1 with a seed, and prompt logprobs, which read no cache."""
    first, _, plain = engines
    question = LIBRARY + "Name three things."
    sampling = {"n": 3, "temperature": 0.8, "seed": 7, "max_tokens": 40}
    assert first.answer(question, **sampling)["token_ids"] == plain.answer(question, **sampling)["token_ids"]
    scored = first.answer(question, max_tokens=4, prompt_logprobs=1)
    assert scored["prompt_logprobs"] == scored["prompt_tokens"]
    assert not scored["cached_tokens"]
    assert first.ask("standing")["held"] == 0


def test_an_aborted_request_leaves_nothing_held(engines: tuple[Any, Any, Any], engine_service: ServiceProcess) -> None:
    """In the middle of a prompt that is computed in chunks, and while it is answered."""
    _, second, _ = engines
    for steps in (1, 3, 8):
        assert second.ask("abort_after", prompt=f"{steps} {MUSEUM}", steps=steps)["steps"] < steps + 5
        assert second.ask("standing")["held"] == 0
    with opened(engine_service) as pool:
        assert settled(pool).reserved_block_count == 0


def test_a_reset_is_one_engines_own(engines: tuple[Any, Any, Any], start_engine: StartEngine) -> None:
    """What was there is no hit any more to the engine that has reset its cache, and still one to the others."""
    first, _, plain = engines
    third = start_engine().wait_ready()
    question = LIBRARY + "When is it closed?"
    first.answer(question, max_tokens=4)
    assert third.answer(question, max_tokens=4)["cached_tokens"] > 0
    assert third.ask("reset")["reset"]
    again = third.answer(question, max_tokens=12)
    assert again["cached_tokens"] == 0
    assert again["token_ids"] == plain.answer(question, max_tokens=12)["token_ids"]
    assert third.answer(question, max_tokens=4)["cached_tokens"] > 0
    assert first.answer(question, max_tokens=4)["cached_tokens"] > 0
    third.leave()
