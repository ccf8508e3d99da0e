"""Calls over the Unix socket of a real service process, against an empty call on the same server."""

import time
from array import array
from collections.abc import Callable
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.figures import Figure, interleaved, seconds
from kvharbor.client import BlockRun, Chain, Harbor, Pool, connect
from kvharbor.gpumem import DataType, Layout

PROMPT = array("I", range(2_048)).tobytes()


def layout(model: str, block_tokens: int = 64) -> Layout:
    """Returns a layout of small blocks: what is measured is bookkeeping, not memory."""
    return Layout.attention(
        model, layers=1, kv_heads=1, head_dim=16, data_type=DataType.FLOAT16, block_tokens=block_tokens
    )


def open_pool(harbor: Harbor, name: str, block_tokens: int, block_count: int) -> Pool:
    """Opens a pool of small blocks, so many of them usable."""
    shape = layout(name, block_tokens)
    return harbor.open_pool(name, shape, size=shape.block_bytes * (block_count + shape.scratch_blocks))


def commit_prompt(pool: Pool, token_ids: bytes) -> None:
    """Leaves a prompt in the pool, cached. What its bytes are does not matter here."""
    with pool.allocate(token_ids) as sequence:
        sequence.commit(len(token_ids) // 4)


def acquire_s(pool: Pool, token_ids: bytes) -> float:
    """Acquires what is there of a prompt and a block more, on the stream; returns the seconds until the answer."""
    whole = len(token_ids) // 4 // pool.block_tokens
    chain = Chain(tokens=token_ids[: 4 * whole * pool.block_tokens], table_block_count=whole + 1)
    start = time.perf_counter()
    (acquired,) = pool.blocks.acquire([chain])
    taken = time.perf_counter() - start
    if len(acquired.held) != whole:
        raise RuntimeError(f"{len(acquired.held)} blocks are held instead of {whole}")
    pool.blocks.release(BlockRun.join([acquired.held, acquired.leased]))
    # Nobody has to wait for a release; here it would slow whatever is measured next.
    pool.blocks.flush()
    return taken


def measure(socket_path: Path, rounds: int) -> list[Figure]:
    """Measures `allocate_2048_over_empty_call`, and the same prompt acquired on the session's stream."""
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
            "acquire": lambda: acquire_s(pool, PROMPT),
        }
        taken = interleaved(samples, rounds)
    ratio = taken["pair"] / 2 / taken["empty"]
    return [
        Figure("empty_call_us", taken["empty"] * 1e6, "us", None),
        Figure("allocate_2048_over_empty_call", ratio, "ratio", 1.5),
        Figure("acquire_2048_over_empty_call", taken["acquire"] / taken["empty"], "ratio", None),
    ]
