"""A vLLM engine in a process of its own, for tests: plain, or with the connector.

    python connector_engine.py '{"model": folder, "arguments": {...}}'

Says {"ready": true}, or {"refused": text} and ends. Then answers each line {"prompts": [[ids]], "new_tokens": n} with
{"answers": [[ids]], "cached": [tokens]}.
"""

import json
import os
import sys
from typing import Any


def main(settings: dict[str, Any]) -> None:
    """Serves until the end of its input."""
    # vLLM and what it starts write to stdout.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**fields: Any) -> None:
        out.write(json.dumps(fields) + "\n")
        out.flush()

    from vllm import LLM, SamplingParams

    try:
        engine = LLM(
            settings["model"],
            max_model_len=768,
            enforce_eager=True,
            disable_log_stats=False,
            kv_cache_memory_bytes=48 << 20,
            **settings["arguments"],
        )
    except Exception as refused:
        say(refused=f"{type(refused).__name__}: {refused}")
        raise SystemExit(0) from None
    say(ready=True)
    for line in sys.stdin:
        asked = json.loads(line)
        sampling = SamplingParams(temperature=0, max_tokens=asked["new_tokens"], ignore_eos=True)
        prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
        say(begun=True)
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        say(
            answers=[list(output.outputs[0].token_ids) for output in outputs],
            cached=[output.num_cached_tokens for output in outputs],
        )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
