"""A client process of its own: `python -m bench.client_driver SOCKET POOL BLOCK_TOKENS BLOCK_COUNT FIRST_TOKEN TOKENS`.

Commands: "empty" and "pair" call for some seconds, and answer how many calls a second were made; "loop" takes prompts
that were never seen through their lives, until the next command comes, which ends it.
"""

import json
import select
import sys
import time
from array import array
from collections.abc import Callable
from itertools import count
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.calls import commit_prompt, open_pool
from kvharbor.client import Pool, connect


def calls_per_s(action: Callable[[], None], calls: int, seconds: float) -> float:
    """Repeats an action of so many calls for some seconds."""
    start = time.perf_counter()
    end, made = start + seconds, 0
    while (now := time.perf_counter()) < end:
        action()
        made += calls
    return made / (now - start)


def loop(pool: Pool, first_token: int, token_count: int) -> int:
    """Serves prompts until there is a command to read; returns how many."""
    for served in count(1):
        first = first_token + served * token_count
        commit_prompt(pool, array("I", range(first, first + token_count)).tobytes())
        if select.select([sys.stdin], [], [], 0)[0]:
            return served
    raise AssertionError("count() ends")


def main() -> None:
    """Answers commands until the pipe ends."""
    socket_path, pool_name = sys.argv[1:3]
    block_tokens, block_count, first_token, token_count = map(int, sys.argv[3:])
    with connect(socket_path) as harbor, grpc.insecure_channel(f"unix:{socket_path}") as channel:
        pool = open_pool(harbor, pool_name, block_tokens, block_count)
        health, empty = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest()
        prompt = array("I", range(first_token, first_token + token_count)).tobytes()
        commit_prompt(pool, prompt)
        actions: dict[str, tuple[Callable[[], None], int]] = {
            "empty": (lambda: health.Check(empty), 1),
            "pair": (lambda: pool.allocate(prompt).release(), 2),
        }
        for line in sys.stdin:
            command: dict[str, Any] = json.loads(line)
            if command["do"] in actions:
                answer = {"calls_per_s": calls_per_s(*actions[command["do"]], command["seconds"])}
            elif command["do"] == "loop":
                answer = {"served": loop(pool, first_token, token_count)}
            else:
                answer = {}
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
