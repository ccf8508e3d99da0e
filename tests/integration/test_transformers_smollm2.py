"""A real model on a real pool."""

from typing import Any

import pytest
import torch

from kvharbor.engines.transformers import ModelMissing, Worker, layout_for, load_smollm2
from pool_sessions import PoolSessions
from pool_sessions import sessions as sessions

pytestmark = [pytest.mark.slow, pytest.mark.model]

SYSTEM = (
    "You are the guide of a small harbour museum. Answer in one or two plain sentences. The museum has three halls: "
    "the first shows ropes, sails and knots, the second shows charts, compasses and lighthouse lamps, and the third "
    "shows a fishing boat of 1921 that visitors may board. It opens at nine in the morning and closes at five in the "
    "afternoon, and on Mondays it stays closed. Children under twelve enter without paying. Dogs wait outside, where "
    "a bowl of water stands beside the door."
)
QUESTIONS = ("When does the museum open?", "What can I see in the second hall?", "May I bring my dog?")


def alone(model: Any, prompt: list[int], answer: tuple[int, ...]) -> list[int]:
    """What the model without any cache says after the prompt, as long as it says the answer's tokens.

    One pass over both: token by token it would see the same, as each position depends on earlier ones only.
    """
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answer[:-1]]]), use_cache=False, logits_to_keep=len(answer)).logits
    chosen: list[int] = logits[0].argmax(-1).tolist()
    return chosen


def test_warm_answers_are_those_of_the_model_without_any_cache(sessions: PoolSessions) -> None:
    """Three questions behind one system prompt, over two sessions: all but the question is reused, no token differs."""
    try:
        model, tokenizer = load_smollm2()
    except ModelMissing as missing:
        pytest.skip(str(missing))
    workers = [Worker(model, sessions.open(layout_for(model, 16), 40)) for _ in range(2)]
    reused = []
    for turn, question in enumerate(QUESTIONS):
        chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        prompt = tokenizer.encode(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        (made,) = workers[turn % 2].generate([prompt], 24)
        assert list(made.token_ids) == alone(model, prompt, made.token_ids)
        reused.append(made.reused_tokens)
    assert reused[0] == 0
    assert min(reused[1:]) >= 96
