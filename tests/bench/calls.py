"""Calls over the Unix socket of a real service process, against an empty call on the same server."""

from array import array
from collections.abc import Callable
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.figures import Figure, interleaved, seconds
from kvharbor.client import Pool, connect
from kvharbor.gpumem import DataType, Layout

PROMPT = array("I", range(2_048)).tobytes()


def layout(model: str) -> Layout:
    """Returns a layout of small blocks: what is measured is bookkeeping, not memory."""
    return Layout.attention(model, layers=1, kv_heads=1, head_dim=16, data_type=DataType.FLOAT16)


def commit_prompt(pool: Pool, token_ids: bytes) -> None:
    """Leaves a prompt in the pool, cached. What its bytes are does not matter here."""
    with pool.allocate(token_ids) as sequence:
        sequence.commit(len(token_ids) // 4)


def measure(socket_path: Path, rounds: int) -> list[Figure]:
    """Measures `allocate_2048_over_empty_call`."""
    with connect(str(socket_path)) as harbor, grpc.insecure_channel(f"unix:{socket_path}") as channel:
        pool = harbor.open_pool("calls", layout("calls"), size="16MiB")
        commit_prompt(pool, PROMPT)
        health = health_pb2_grpc.HealthStub(channel)
        empty = health_pb2.HealthCheckRequest()

        def allocate_and_release() -> None:
            pool.allocate(PROMPT).release()

        samples: dict[str, Callable[[], float]] = {
            "empty": lambda: seconds(lambda: health.Check(empty)),
            "pair": lambda: seconds(allocate_and_release),
        }
        taken = interleaved(samples, rounds)
    ratio = taken["pair"] / 2 / taken["empty"]
    return [
        Figure("empty_call_us", taken["empty"] * 1e6, "us", None),
        Figure("allocate_2048_over_empty_call", ratio, "ratio", 1.5),
    ]
