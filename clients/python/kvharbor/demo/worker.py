"""One worker of the demonstration: a process that loads the model, maps the pool and answers on its pipes.

It reads one JSON object a line from standard input and writes one a line to standard output: `stage` lines while
it loads, then `ready`, then one reply a request; or `failed` where there is no model.
"""

import json
import sys
from typing import Any

import torch
from torch import Tensor

from kvharbor.client import connect
from kvharbor.engines.transformers import ModelMissing, Worker, layout_for, load_smollm2, this_engine

POOL = "demo"
BLOCK_TOKENS = 64


def main(socket_path: str, name: str) -> None:
    """Serves requests until standard input ends."""
    torch.set_num_threads(1)
    try:
        model, tokenizer = load_smollm2(progress=lambda stage: _say(stage=stage))
    except ModelMissing as missing:
        _say(failed=str(missing))
        return
    _say(stage="mapping the pool")
    with connect(socket_path, client_name=name, engine=this_engine()) as harbor:
        pool = harbor.open_pool(POOL, layout_for(model, BLOCK_TOKENS))
        worker = Worker(model, pool)
        # The first run of a model pays for one-time set-up. The prompt is shorter than a block, so that it
        # leaves nothing in the pool.
        worker.generate([tokenizer.encode("Hello")], max_new_tokens=2)
        _say(ready=True, block_bytes=pool.descriptor.layout.block_bytes)
        for line in sys.stdin:
            request = json.loads(line)
            if "messages" in request:
                _say(**_answer(worker, tokenizer, request["messages"], request["max_new_tokens"]))
            else:
                _say(identical=_is_greedy(model, request["prompt_ids"], request["answer_ids"]))


def _answer(worker: Worker, tokenizer: Any, messages: list[dict[str, str]], max_new_tokens: int) -> dict[str, Any]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt_ids = tokenizer.encode(text)
    (made,) = worker.generate([prompt_ids], max_new_tokens)
    return {
        "prompt_ids": prompt_ids,
        "answer_ids": list(made.token_ids),
        "answer": tokenizer.decode(made.token_ids, skip_special_tokens=True).strip(),
        "reused_tokens": made.reused_tokens,
        "computed_tokens": made.computed_tokens,
        "ttft_s": made.time_to_first_token_s,
    }


def _is_greedy(model: Any, prompt_ids: list[int], answer_ids: list[int]) -> bool:
    """Whether the model without any cache would give exactly this answer.

    One pass over prompt and answer, nothing cached: if every answer token is the most likely one after all
    tokens before it, then generating token by token without a cache gives them one after the other.
    """
    with torch.inference_mode():
        token_ids = torch.tensor([prompt_ids + answer_ids[:-1]])
        logits: Tensor = model(token_ids, use_cache=False, logits_to_keep=len(answer_ids)).logits
    return bool(logits[0].argmax(-1).tolist() == answer_ids)


def _say(**message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
