"""L3: a request of a million tokens must not freeze the small ones."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import quantiles

import pytest

from conftest import StartService
from kvharbor.client import Harbor, Pool, connect
from kvharbor.gpumem import DataType, Layout

pytestmark = pytest.mark.slow

BLOCK_COUNT = 100_000
# Far above what a slice takes, far below what an undivided request of this size would (0.2 s and more).
LIMIT_S = 0.1
SAMPLES = 300
LAYOUT = Layout.attention("l3", layers=1, kv_heads=1, head_dim=2, data_type=DataType.FLOAT16, block_tokens=16)

BIG_CLIENT = """
import sys
from array import array
from kvharbor.client import connect
from cases.test_l3_big_request_beside_small_ones import open_pool
with connect(sys.argv[1]) as harbor:
    pool = open_pool(harbor)
    tokens = array("I", range(2**20)).tobytes()
    while True:
        with pool.allocate(tokens) as sequence:
            sequence.commit(2**20)
        print("done", flush=True)
"""


def open_pool(harbor: Harbor) -> Pool:
    """Opens the pool of this case."""
    return harbor.open_pool("l3", LAYOUT, LAYOUT.block_bytes * (BLOCK_COUNT + LAYOUT.scratch_blocks))


def small_calls(pool: Pool) -> list[float]:
    """Returns the seconds of many small Allocates with their Releases."""
    taken = []
    for _ in range(SAMPLES):
        start = time.perf_counter()
        pool.allocate(range(8)).release()
        taken.append(time.perf_counter() - start)
    return taken


@pytest.fixture
def big_client(start_fresh: StartService) -> "Iterator[tuple[Harbor, Pool, subprocess.Popen[str]]]":
    """A service, a pool, and a process that allocates a million tokens over and over."""
    service = start_fresh()
    with connect(service.target) as harbor:
        pool = open_pool(harbor)
        command = [sys.executable, "-c", BIG_CLIENT, str(service.socket)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=_environment()) as big:
            yield harbor, pool, big
            big.kill()


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}


def test_small_calls_stay_quick_beside_a_million_tokens(
    big_client: "tuple[Harbor, Pool, subprocess.Popen[str]]",
) -> None:
    """L3: the 99th percentile of small calls, and a statistics call, stay below the limit."""
    harbor, pool, big = big_client
    assert big.stdout is not None
    assert big.stdout.readline() == "done\n"
    taken = small_calls(pool)
    start = time.perf_counter()
    stats = harbor.stats("l3")
    stats_s = time.perf_counter() - start
    assert big.poll() is None
    assert quantiles(taken, n=100)[-1] <= LIMIT_S
    assert stats_s <= LIMIT_S
    assert stats.pools[0].counters.prompt_token_count > 2**20
