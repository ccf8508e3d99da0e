"""Continuous batching in the test's own process: prompts, and what the model says to them."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from kvharbor.engines.transformers_cb import PooledManager

BLOCK_TOKENS = 16
DEADLINE_S = 60.0
_GENERATOR = torch.Generator().manual_seed(11)
SYSTEM, QUESTION, OTHER = (torch.randint(0, 128, (length,), generator=_GENERATOR).tolist() for length in (70, 30, 21))
PROMPTS = [SYSTEM + QUESTION, SYSTEM + OTHER, OTHER, QUESTION + SYSTEM]


def greedy(answer_count: int = 1) -> GenerationConfig:
    """Settings of a model that has no stop token."""
    settings = GenerationConfig(do_sample=False, eos_token_id=None, max_new_tokens=20)  # type: ignore[no-untyped-call]
    settings.num_return_sequences = answer_count  # which are all the same here, so that a constructor refuses it
    return settings


def alone(model: Any, prompt: Sequence[int], new_token_count: int) -> list[int]:
    """What the model says without any cache."""
    tokens = [*prompt]
    with torch.inference_mode():
        for _ in range(new_token_count):
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def finished(manager: PooledManager, request_ids: Sequence[str]) -> list[Any]:
    """Waits for the outcome of each request."""
    outcomes: dict[str, Any] = {}
    while len(outcomes) < len(request_ids):
        result = manager.get_result(timeout=DEADLINE_S)
        assert result is not None, f"{len(outcomes)} of {len(request_ids)} within {DEADLINE_S} s"
        if result.is_finished():
            outcomes[result.request_id] = result
    return [outcomes[request_id] for request_id in request_ids]


def answers(manager: PooledManager, prompts: Sequence[Sequence[int]], new_token_count: int = 20) -> list[list[int]]:
    """What the engine says to prompts that come all at once."""
    request_ids = manager.add_requests([[*prompt] for prompt in prompts], max_new_tokens=new_token_count)
    outcomes = finished(manager, request_ids)
    assert [outcome.error for outcome in outcomes] == [None] * len(prompts)
    return [outcome.generated_tokens for outcome in outcomes]
