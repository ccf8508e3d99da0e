"""One vLLM engine of the demonstration, in a process of its own.

    python -m kvharbor.demo.vllm.engine REPLY_FD '{"model": ..., more arguments of vllm.LLM}'

Takes requests as lines of JSON on standard input, {"prompts": {name: token ids}, "most_tokens": n}, and answers on
REPLY_FD: first {"ready": true, "kv_ranges": [[first, end]]} with the addresses of its KV caches, then to each request
{"first": name, ...} with its first token, {"done": name, ...} with all of them, and {"idle": true} when none is left.
Times are of the monotonic clock, which processes of a host share.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Say = Callable[..., None]
Telling = Callable[[], dict[str, Any]]


def main(watch: Callable[[Any], Telling] = lambda _: dict) -> None:
    """Serves until standard input ends. `watch` gets the engine and returns what has more to tell when it is idle."""
    replies = os.fdopen(int(sys.argv[1]), "w")

    def say(**message: Any) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    from vllm import LLM

    llm = LLM(**json.loads(sys.argv[2]))
    # The first run of a model pays for one-time set-up. It is shorter than a block and leaves nothing in the pool.
    _answer(llm, {"warming up": [1, 2, 3]}, 2, lambda **_: None)
    told = watch(llm)
    (kv_ranges,) = llm.collective_rpc(_kv_ranges)
    say(ready=True, at_s=time.monotonic(), kv_ranges=kv_ranges)
    for line in sys.stdin:
        request = json.loads(line)
        _answer(llm, request["prompts"], request["most_tokens"], say)
        say(idle=True, **told())


def _kv_ranges(worker: Any) -> list[tuple[int, int]]:
    """Where the KV caches of a worker's layers lie in its process."""
    storages = [cache.untyped_storage() for cache in worker.model_runner.kv_caches]
    return sorted({(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages})


def _answer(llm: Any, prompts: dict[str, list[int]], most_tokens: int, say: Say) -> None:
    """Has prompts answered as one batch."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    asked_s = time.monotonic()
    for name, prompt_ids in prompts.items():
        sampling = SamplingParams(temperature=0.0, max_tokens=most_tokens, ignore_eos=True)
        engine.add_request(name, {"prompt_token_ids": prompt_ids}, sampling)
    begun = set()
    while engine.has_unfinished_requests():
        for output in engine.step():
            name, answer_ids = output.request_id, [*output.outputs[0].token_ids]
            if answer_ids and name not in begun:
                begun.add(name)
                say(first=name, asked_s=asked_s, at_s=time.monotonic(), reused_tokens=output.num_cached_tokens or 0)
            if output.finished:
                say(done=name, at_s=time.monotonic(), answer_ids=answer_ids, answer=output.outputs[0].text)


if __name__ == "__main__":
    main()
