"""An engine of continuous batching in a process of its own, for tests that kill it or compare it with another.

    python cb_worker.py TARGET POOL BLOCK_COUNT MODEL NEW_TOKENS < prompts.json

Writes a line once it runs, and one for each answer: {"answer": ids, "prompt": number, "reused": tokens so far}.
"""

import json
import sys
from typing import Any

import torch
from transformers import GenerationConfig

from kvharbor.client import connect
from kvharbor.engines.transformers import load_smollm2
from kvharbor.engines.transformers_cb import continuous_batching, layout_for
from tiny_models import decoder


def say(**fields: Any) -> None:
    """Writes a line."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def main(target: str, pool_name: str, block_count: str, model_name: str, new_tokens: str) -> None:
    """Answers the prompts, all at once."""
    torch.set_num_threads(1)
    prompts = json.load(sys.stdin)
    model, block_tokens = (load_smollm2()[0], 64) if model_name == "smollm2" else (decoder(model_name), 16)
    layout = layout_for(model, block_tokens)
    settings = GenerationConfig(do_sample=False, eos_token_id=None, max_new_tokens=int(new_tokens))  # type: ignore[no-untyped-call]
    with connect(target, client_name="cb-worker") as harbor:
        pool = harbor.open_pool(pool_name, layout, int(block_count) * layout.block_bytes)
        with continuous_batching(model, pool, settings) as engine:
            request_ids = engine.add_requests(prompts, max_new_tokens=int(new_tokens))
            say(running=True)
            for _ in prompts:
                result = engine.get_result(timeout=120)
                assert result is not None
                assert result.error is None, result.error
                say(
                    prompt=request_ids.index(result.request_id),
                    answer=result.generated_tokens,
                    reused=engine.reuse.reused_tokens,
                )
        del pool


if __name__ == "__main__":
    main(*sys.argv[1:])
