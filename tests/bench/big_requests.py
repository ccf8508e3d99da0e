"""Prompts of 2^20 tokens: what they take in the service, and what small calls take beside them."""

from array import array
from collections.abc import Callable
from itertools import count
from pathlib import Path
from statistics import median, quantiles

from bench.calls import open_pool
from bench.drivers import driver, ours
from bench.figures import Figure, interleaved, seconds
from kvharbor.client import Pool, connect
from scraping import scrape

TOKENS = 2**20
# One and a half such prompts, so that each evicts what is left of those before.
POOL_TOKENS = TOKENS * 3 // 2
BESIDE_BLOCK_TOKENS = 16
SMALL_TOKENS = 8
SMALL_CALLS = 500


def measure(socket_path: Path, metrics_address: str, rounds: int) -> list[Figure]:
    """Measures `allocate_2e20_cold_ms` and `small_p99_ms_meanwhile`."""
    with connect(str(socket_path)) as harbor:
        pools = {tokens: open_pool(harbor, f"big-b{tokens}", tokens, POOL_TOKENS // tokens) for tokens in (64, 16)}
        taken = interleaved({f"b{tokens}": _big(pool, metrics_address) for tokens, pool in pools.items()}, rounds)
        alone, meanwhile = _small(socket_path, pools[BESIDE_BLOCK_TOKENS])
    return [
        Figure("allocate_2e20_cold_ms", taken["b64"] * 1e3, "ms", 100.0),
        Figure("allocate_2e20_cold_ms_b16", taken["b16"] * 1e3, "ms", None),
        Figure("small_p50_ms_alone", median(alone) * 1e3, "ms", None),
        Figure("small_p99_ms_alone", _p99(alone) * 1e3, "ms", None),
        Figure("small_p50_ms_meanwhile", median(meanwhile) * 1e3, "ms", None),
        Figure("small_p99_ms_meanwhile", _p99(meanwhile) * 1e3, "ms", 50.0),
    ]


def _big(pool: Pool, metrics_address: str) -> Callable[[], float]:
    """Returns a sampler of the service's own seconds for an Allocate of a prompt that was never seen."""
    numbers = count()

    def take() -> float:
        first = next(numbers) * TOKENS
        token_ids = array("I", range(first, first + TOKENS)).tobytes()
        before = _allocating_s(metrics_address)
        with pool.allocate(token_ids) as sequence:
            taken = _allocating_s(metrics_address) - before
            sequence.commit(TOKENS)
        return taken

    return take


def _allocating_s(metrics_address: str) -> float:
    """Returns how long all calls of Allocate have taken in the service, from their arrival to their answer."""
    durations = scrape(metrics_address).values("kvharbor_rpc_duration_seconds_sum", method="Allocate")
    return sum(durations.values())


def _small(socket_path: Path, pool: Pool) -> tuple[list[float], list[float]]:
    """Returns the seconds of small Allocates with their Releases: alone, and beside a client of big prompts."""
    sizes = (BESIDE_BLOCK_TOKENS, POOL_TOKENS // BESIDE_BLOCK_TOKENS, 2**31, TOKENS)
    command = ours("bench.client_driver", str(socket_path), pool.name, *map(str, sizes))
    with driver("the client of big prompts", command) as big:
        big.ask(do="nothing")
        alone = _small_calls(pool)
        big.send(do="loop")
        meanwhile = _small_calls(pool)
        big.send(do="nothing")
        served = big.answer()["served"]
        big.answer()
    if served < 2:
        raise RuntimeError("the small calls were over before a second big prompt began")
    return alone, meanwhile


def _small_calls(pool: Pool) -> list[float]:
    prompt = array("I", range(SMALL_TOKENS)).tobytes()
    return [seconds(lambda: pool.allocate(prompt).release()) for _ in range(SMALL_CALLS)]


def _p99(taken: list[float]) -> float:
    return quantiles(taken, n=100)[-1]
