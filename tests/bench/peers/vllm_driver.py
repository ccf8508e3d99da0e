"""vLLM's KVCacheManager, driven over a pipe: a command is a line of JSON, and so is its answer.

Runs in an environment that has vLLM and nothing of ours. The manager is what vLLM's scheduler has, with its own
defaults: prefix caching, SHA-256, no events, no statistics.
"""

import json
import sys
import time
from statistics import median
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

MODEL_TOKENS = 2**20


class Manager:
    """A manager, and requests for it."""

    def __init__(self, block_tokens: int, block_count: int) -> None:
        spec = FullAttentionSpec(block_size=block_tokens, num_kv_heads=1, head_size=16, dtype=torch.float16)
        self._manager = KVCacheManager(
            # One more, as vLLM keeps block 0 for itself.
            KVCacheConfig(
                num_blocks=block_count + 1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
            ),
            max_model_len=MODEL_TOKENS,
            scheduler_block_size=block_tokens,
            hash_block_size=block_tokens,
        )
        self._hasher = get_request_block_hasher(block_tokens, sha256)
        self._parameters = SamplingParams(max_tokens=1)
        self._served = 0

    def serve(self, token_ids: list[int]) -> tuple[float, ...]:
        """Takes a request through its life; returns the seconds that each step took, and the tokens that it hit."""
        manager = self._manager
        self._served += 1
        start = time.perf_counter()
        # A request hashes its blocks as it is made.
        request = Request(str(self._served), token_ids, self._parameters, None, block_hasher=self._hasher)
        hashed = time.perf_counter()
        blocks, cached_tokens, _ = manager.get_computed_blocks(request)
        matched = time.perf_counter()
        if manager.allocate_slots(request, len(token_ids) - cached_tokens, cached_tokens, blocks) is None:
            raise RuntimeError("the manager is full")
        allocated = time.perf_counter()
        manager.free(request)
        freed = time.perf_counter()
        return hashed - start, matched - hashed, allocated - matched, freed - allocated, cached_tokens


def main() -> None:
    """Answers commands until the pipe ends."""
    # Answers only: what vLLM prints goes elsewhere.
    answers, sys.stdout = sys.stdout, sys.stderr
    init_none_hash(sha256)
    managers: dict[str, Manager] = {}
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        if command["do"] == "make":
            managers[command["name"]] = Manager(command["block_tokens"], command["block_count"])
            # As vLLM's engine does when it has made its own.
            freeze_gc_heap()
            answer = {}
        else:
            manager, token_count = managers[command["name"]], command["token_count"]
            prompts = [list(range(first, first + token_count)) for first in command["first_tokens"]]
            taken = [manager.serve(prompt) for prompt in prompts]
            names = ("hash_s", "match_s", "allocate_s", "free_s", "cached_tokens")
            answer = dict(zip(names, map(median, zip(*taken, strict=True)), strict=True))
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
