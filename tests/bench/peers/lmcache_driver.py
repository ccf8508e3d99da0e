"""A client of LMCache's server, driven over a pipe: a command is a line of JSON, and so is its answer.

Runs in an environment that has LMCache and nothing of ours. The client is the one of `lmcache bench server`, with a
worker whose memory is on the CPU; the server moves the bytes to it through POSIX shared memory, which is its default
and its fastest way here.
"""

import json
import sys
from statistics import median
from typing import Any

import torch
from lmcache.cli.commands.bench.server_bench.client import RequestContext, ServerBenchClient, TransferResult
from lmcache.cli.commands.bench.server_bench.config import BenchConfig
from lmcache.cli.commands.bench.server_bench.helpers import _make_key, _wait_for_result

PROMPT = 1


def client(url: str, http_url: str, token_count: int, shape: str) -> ServerBenchClient:
    """Returns a started client with a worker of one layer group."""
    config = BenchConfig(
        rpc_url=url,
        http_url=http_url,
        mode="cpu",
        transfer_mode="lmcache_driven",
        tp_size=1,
        use_mla=False,
        num_tokens=token_count,
        kvcache_shape_spec=shape,
        num_blocks=0,
        block_size=0,
    )
    made = ServerBenchClient(config, log=lambda _: None)
    made.start()
    return made


def request(made: ServerBenchClient, name: str) -> RequestContext:
    """Returns a request for the prompt."""
    context = made.create_request(PROMPT, name, "")
    if context is None:
        raise RuntimeError("the prompt is shorter than a chunk")
    return context


def checked(result: TransferResult | None, what: str) -> TransferResult:
    """Returns the result of a transfer that has succeeded."""
    if result is None or not result.succeeded:
        raise RuntimeError(f"the {what} failed")
    return result


def fill(made: ServerBenchClient) -> None:
    """Leaves the prompt in the server, and sees to it that it comes back as it was."""
    context = request(made, "fill")
    # The worker's memory, which LMCache has moved to shared memory by now.
    layers = list(made._workers[0].kv_caches.values())
    before = [layer.clone() for layer in layers]
    made.lookup(context)
    checked(made.store(context, 0, context.num_full_tokens), "store")
    made.end_session(context)
    for layer in layers:
        layer.zero_()
    retrieved_s(made, "check")
    first, last = context.block_offset, context.block_offset + context.num_blocks
    for was, layer in zip(before, layers, strict=True):
        if not torch.equal(was[:, first:last], layer[:, first:last]):
            raise RuntimeError("what came back is not what was stored")


def looked_up_s(made: ServerBenchClient, context: RequestContext) -> float:
    """Looks the prompt up, which locks what is there; returns the seconds."""
    found = made.lookup(context)
    if not found.is_full_hit:
        raise RuntimeError(f"{found.hit_chunks} of {found.total_chunks} chunks are there")
    taken_ms: float = found.latency_ms
    return taken_ms / 1e3


def lookup_s(made: ServerBenchClient, name: str) -> float:
    """Looks the prompt up, and unlocks it as an engine does that has it already; returns the seconds of the lookup."""
    context = request(made, name)
    taken = looked_up_s(made, context)
    key = _make_key(context.token_ids, context.request_id, start=0, end=context.num_full_tokens)
    _wait_for_result(made._require_started().free_lookup_locks(key, 1))
    made.end_session(context)
    return taken


def retrieved_s(made: ServerBenchClient, name: str) -> float:
    """Looks the prompt up and retrieves it, which unlocks it; returns the seconds of both."""
    context = request(made, name)
    taken = looked_up_s(made, context)
    retrieved = checked(made.retrieve(context, 0, context.num_full_tokens), "retrieve")
    made.end_session(context)
    transfer_ms: float = retrieved.latency_ms
    return taken + transfer_ms / 1e3


def main() -> None:
    """Answers commands until the pipe ends."""
    # Answers only: what LMCache prints goes elsewhere.
    answers, sys.stdout = sys.stdout, sys.stderr
    actions = {"lookup": lookup_s, "retrieve": retrieved_s}
    made: ServerBenchClient | None = None
    for number, line in enumerate(sys.stdin, start=1):
        command: dict[str, Any] = json.loads(line)
        if made is None:
            made = client(command["url"], command["http_url"], command["token_count"], command["shape"])
            fill(made)
            answer = {}
        else:
            action = actions[command["do"]]
            answer = {"taken_s": median(action(made, f"{number}.{time}") for time in range(command["times"]))}
        print(json.dumps(answer), file=answers, flush=True)
    if made is not None:
        made.close()


if __name__ == "__main__":
    main()
