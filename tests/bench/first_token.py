"""Time to first token with a shared prefix, against computing only the suffix on private memory."""

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import DynamicCache

from bench.figures import Figure, interleaved, seconds
from kvharbor.client import connect
from kvharbor.engines.transformers import Worker, layout_for, load_smollm2

PREFIX_TOKENS = 448
SUFFIX_TOKENS = 60


def measure(socket_path: Path, rounds: int) -> list[Figure]:
    """Measures `ttft_warm_over_suffix_only` on SmolLM2, one thread."""
    torch.set_num_threads(1)
    model, _ = load_smollm2()
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(100, 40_000, (PREFIX_TOKENS + SUFFIX_TOKENS,), generator=generator)
    prompt = drawn.tolist()
    with connect(str(socket_path)) as harbor:
        pool = harbor.open_pool("first-token", layout_for(model), size="256MiB")
        worker = Worker(model, pool)
        worker.generate([prompt], 1)
        private = DynamicCache(config=model.config)
        with torch.inference_mode():
            model(drawn[None, :PREFIX_TOKENS], cache=private)

        def warm() -> float:
            (made,) = worker.generate([prompt], 1)
            if made.reused_tokens != PREFIX_TOKENS:
                raise RuntimeError(f"{made.reused_tokens} tokens reused instead of {PREFIX_TOKENS}")
            return made.time_to_first_token_s

        def suffix_only() -> float:
            cache = copy.deepcopy(private)

            def compute() -> None:
                with torch.inference_mode():
                    logits = model(drawn[None, PREFIX_TOKENS:], cache=cache, logits_to_keep=1).logits
                    logits[0, -1].argmax().item()

            return seconds(compute)

        samples: dict[str, Callable[[], float]] = {"warm": warm, "suffix": suffix_only}
        interleaved(samples, 2)
        taken = interleaved(samples, rounds)
    return [
        Figure("ttft_suffix_only_ms", taken["suffix"] * 1e3, "ms", None),
        Figure("ttft_warm_over_suffix_only", taken["warm"] / taken["suffix"], "ratio", 1.05),
    ]
