"""Our pool, and our Allocate over the socket, beside the manager that vLLM has in its own process."""

import gc
import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median

from bench.calls import open_pool
from bench.drivers import Driver
from bench.figures import Figure, interleaved_parts
from bench.peers.processes import driver
from kvharbor.client import Pool as ServedPool
from kvharbor.client import connect
from kvharbor.pool import Commit, Pool, PoolConfig, Prompt
from kvharbor.pool.steps import finish

SESSION = 1
POOL_TOKENS = 2**18
Parts = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests that everybody gets in the same order: prompts of consecutive token ids, told by their first ones."""

    token_count: int
    burst: int
    repeats: bool

    def bursts(self) -> Callable[[], list[int]]:
        """Returns what gives the next requests: in turn half of what the pool can hold, or some never seen."""
        kept = POOL_TOKENS // self.token_count // 2
        numbers = count()

        def following() -> list[int]:
            drawn = [next(numbers) for _ in range(self.burst)]
            return [(number % kept if self.repeats else number) * self.token_count for number in drawn]

        return following


# One token more than is there: a model has to compute one.
WARM = Traffic(2_048 + 1, burst=16, repeats=True)
COLD = Traffic(2_048, burst=16, repeats=False)
LONG = Traffic(8_192 + 1, burst=4, repeats=True)


def vllm_sampler(vllm: Driver, block_tokens: int, traffic: Traffic) -> Callable[[], Parts]:
    """Returns a sampler of a manager of its own."""
    name = f"{block_tokens} {traffic}"
    vllm.ask(do="make", name=name, block_tokens=block_tokens, block_count=POOL_TOKENS // block_tokens)
    following = traffic.bursts()
    return lambda: vllm.ask(do="serve", name=name, token_count=traffic.token_count, first_tokens=following())


def pool_sampler(block_tokens: int, traffic: Traffic, policy: str, *, history: bool) -> Callable[[], Parts]:
    """Returns a sampler of a pool of its own, in this process."""
    pool = Pool(PoolConfig(POOL_TOKENS // block_tokens, block_tokens, policy=policy, history=history))
    pool.open_session(SESSION, "bench")
    following = traffic.bursts()

    def serve(token_ids: bytes) -> tuple[float, float, float, int]:
        start = time.perf_counter()
        made = finish(pool.allocate(SESSION, Prompt(token_ids)))
        allocated = time.perf_counter()
        finish(pool.commit(SESSION, made.number, Commit(traffic.token_count)))
        committed = time.perf_counter()
        finish(pool.release(SESSION, made.number))
        released = time.perf_counter()
        pool.drain_events()
        return allocated - start, committed - allocated, released - committed, made.cached_tokens

    def take() -> Parts:
        prompts = [array("I", range(first, first + traffic.token_count)).tobytes() for first in following()]
        taken = [serve(prompt) for prompt in prompts]
        names = ("allocate_s", "commit_s", "release_s", "cached_tokens")
        return dict(zip(names, map(median, zip(*taken, strict=True)), strict=True))

    return take


def socket_sampler(pool: ServedPool, traffic: Traffic) -> Callable[[], Parts]:
    """Returns a sampler of Allocate by the Python client, from the same lists of ints that vLLM gets."""
    following = traffic.bursts()

    def serve(token_ids: list[int]) -> tuple[float, int]:
        start = time.perf_counter()
        sequence = pool.allocate(token_ids)
        allocated = time.perf_counter()
        cached_tokens = sequence.cached_tokens
        sequence.commit(traffic.token_count)
        sequence.release()
        return allocated - start, cached_tokens

    def take() -> Parts:
        taken = [serve(list(range(first, first + traffic.token_count))) for first in following()]
        return dict(zip(("allocate_s", "cached_tokens"), map(median, zip(*taken, strict=True)), strict=True))

    return take


def measure(socket_path: Path, rounds: int) -> list[Figure]:
    """Measures `pool_over_vllm_*` and `socket_over_vllm_hash_and_manager_8192_b16`."""
    with driver("vllm") as vllm, connect(str(socket_path)) as harbor:
        served = open_pool(harbor, "beside-vllm", 16, POOL_TOKENS // 16)
        samples: dict[str, Callable[[], Parts]] = {}
        for block_tokens in (16, 64):
            for case, traffic in (("warm", WARM), ("cold", COLD)):
                key = f"{case}_b{block_tokens}"
                samples[f"vllm_{key}"] = vllm_sampler(vllm, block_tokens, traffic)
                samples[f"lru_{key}"] = pool_sampler(block_tokens, traffic, "lru", history=False)
                samples[f"auto_{key}"] = pool_sampler(block_tokens, traffic, "auto", history=True)
        samples["vllm_long"] = vllm_sampler(vllm, 16, LONG)
        samples["socket_long"] = socket_sampler(served, LONG)
        # Fills the pools, and the caches of whoever has some.
        interleaved_parts(samples, POOL_TOKENS // (COLD.token_count * COLD.burst) + 2)
        # As the service does, and vLLM's engine.
        gc.collect()
        gc.freeze()
        taken = interleaved_parts(samples, rounds)
    _require_same_hits(taken)
    return [figure for tokens in (16, 64) for figure in _at(f"b{tokens}", taken)] + _long(taken)


def _require_same_hits(taken: Mapping[str, Parts]) -> None:
    for name, parts in taken.items():
        peer = taken["vllm_" + name.split("_", 1)[1]]
        if parts["cached_tokens"] != peer["cached_tokens"]:
            raise RuntimeError(f"{name} hits {parts['cached_tokens']} tokens and vLLM {peer['cached_tokens']}")


def _at(size: str, taken: Mapping[str, Parts]) -> list[Figure]:
    """Returns the figures of one block size.

    What is there already: without vLLM's hashes, as its manager has them from the request, and with them, as our match
    needs none. What is new: all of it, hashes and publication included, for both.
    """
    warm, cold = taken[f"vllm_warm_{size}"], taken[f"vllm_cold_{size}"]
    manager_s, cold_s = _manager_s(warm), cold["hash_s"] + _manager_s(cold)
    warm_s = warm["hash_s"] + manager_s
    figures = [
        Figure(f"vllm_manager_us_2048_{size}", manager_s * 1e6, "us", None),
        Figure(f"vllm_us_2048_{size}", warm_s * 1e6, "us", None),
        Figure(f"vllm_cold_us_2048_{size}", cold_s * 1e6, "us", None),
    ]
    for policy, suffix, aim in (("lru", "", 0.25), ("auto", "_auto", None)):
        parts = taken[f"{policy}_warm_{size}"]
        ours_s = parts["allocate_s"] + parts["release_s"]
        parts = taken[f"{policy}_cold_{size}"]
        ours_cold_s = parts["allocate_s"] + parts["commit_s"] + parts["release_s"]
        figures += [
            Figure(f"pool_warm_us_2048_{size}{suffix}", ours_s * 1e6, "us", None),
            Figure(f"pool_cold_us_2048_{size}{suffix}", ours_cold_s * 1e6, "us", None),
            Figure(f"pool_over_vllm_manager_{size}{suffix}", ours_s / manager_s, "ratio", aim),
            Figure(f"pool_over_vllm_with_hash_{size}{suffix}", ours_s / warm_s, "ratio", None),
            Figure(f"pool_over_vllm_cold_{size}{suffix}", ours_cold_s / cold_s, "ratio", None),
        ]
    return figures


def _long(taken: Mapping[str, Parts]) -> list[Figure]:
    vllm, ours = taken["vllm_long"], taken["socket_long"]
    vllm_s = vllm["hash_s"] + vllm["match_s"] + vllm["allocate_s"]
    return [
        Figure("socket_us_8192_b16", ours["allocate_s"] * 1e6, "us", None),
        Figure("vllm_hash_and_manager_us_8192_b16", vllm_s * 1e6, "us", None),
        Figure("socket_over_vllm_hash_and_manager_8192_b16", ours["allocate_s"] / vllm_s, "ratio", 1.0),
    ]


def _manager_s(parts: Parts) -> float:
    return parts["match_s"] + parts["allocate_s"] + parts["free_s"]
