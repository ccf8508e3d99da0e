"""L3: a request of a million tokens must not freeze the small ones, nor must scrapes of a large pool."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import quantiles

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from conftest import StartService
from kvharbor.client import Harbor, Pool, connect
from kvharbor.gpumem import DataType, Layout
from scraping import scrape
from service_process import ServiceProcess

pytestmark = [pytest.mark.slow, pytest.mark.alone]

BLOCK_COUNT = 100_000
# Far above what a slice takes, far below what an undivided request of this size would (0.2 s and more): in the quickest
# of some tries, as a busy machine takes longer now and then.
LIMIT_S = 0.1
MOST_TRIES = 4
HEALTH_LIMIT_S = 1.0
SAMPLES = 200
LAYOUT = Layout.attention("l3", layers=1, kv_heads=1, head_dim=2, data_type=DataType.FLOAT16, block_tokens=16)

# There is room for one of its prompts at a time: each has to evict the other.
BIG_CLIENT = """
import sys
from array import array
from itertools import cycle
from kvharbor.client import connect
from cases.test_l3_big_request_beside_small_ones import open_pool
with connect(sys.argv[1]) as harbor:
    pool = open_pool(harbor)
    for tokens in cycle([array("I", range(first, first + 2**20)).tobytes() for first in (0, 2**20)]):
        with pool.allocate(tokens) as sequence:
            sequence.commit(2**20)
            assert pool.lookup(tokens).present_tokens == 2**20
        print("done", flush=True)
"""


def open_pool(harbor: Harbor) -> Pool:
    """Opens the pool of this case."""
    return harbor.open_pool("l3", LAYOUT, LAYOUT.block_bytes * (BLOCK_COUNT + LAYOUT.scratch_blocks))


def small_p99_s(pool: Pool) -> float:
    """Returns the 99th percentile of the seconds that small Allocates with their Releases take, in the quickest try."""
    tries: list[float] = []
    while not tries or (tries[-1] > LIMIT_S and len(tries) < MOST_TRIES):
        taken = []
        for _ in range(SAMPLES):
            start = time.perf_counter()
            pool.allocate(range(8)).release()
            taken.append(time.perf_counter() - start)
        tries.append(quantiles(taken, n=100)[-1])
    return tries[-1]


@contextlib.contextmanager
def big_client(service: ServiceProcess) -> Iterator[None]:
    """A process that takes cold prompts of a million tokens through their whole life, one after the other."""
    command = [sys.executable, "-c", BIG_CLIENT, str(service.socket)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as big:
        assert big.stdout is not None
        try:
            for _ in range(2):
                assert big.stdout.readline() == "done\n"
            yield
            assert big.poll() is None
        finally:
            big.kill()


@contextlib.contextmanager
def scrapes(service: ServiceProcess, tenant: str) -> Iterator[list[float]]:
    """Scrapes one after the other, and asks for the health; the list gets the seconds of each health call."""
    address = service.wait_for("ready")["metrics_listen"]
    over, health_s, sizes = threading.Event(), list[float](), set[float]()

    def go_on() -> None:
        with grpc.insecure_channel(service.target) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            while not over.is_set():
                began = time.perf_counter()
                health.Check(health_pb2.HealthCheckRequest(), timeout=10)
                health_s.append(time.perf_counter() - began)
                sizes.add(scrape(address).value("kvharbor_pool_size_blocks", tenant=tenant, pool="l3"))

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield health_s
    finally:
        over.set()
        thread.join()
    assert sizes == {BLOCK_COUNT}


def test_small_calls_stay_quick_beside_a_million_tokens(start_fresh: StartService) -> None:
    """L3: the 99th percentile of small calls, and health and statistics calls, stay below the limits."""
    service = start_fresh(metrics_listen="127.0.0.1:0")
    with connect(service.target) as harbor:
        pool = open_pool(harbor)
        p99_s = {"alone": small_p99_s(pool)}
        with scrapes(service, pool.tenant):
            p99_s["scrapes"] = small_p99_s(pool)
        with big_client(service):
            p99_s["big"] = small_p99_s(pool)
            with scrapes(service, pool.tenant) as health_s:
                p99_s["both"] = small_p99_s(pool)
            start = time.perf_counter()
            stats = harbor.stats("l3")
            stats_s = time.perf_counter() - start
    assert {name: seconds for name, seconds in p99_s.items() if seconds > LIMIT_S} == {}
    assert max(stats_s, *health_s) < HEALTH_LIMIT_S
    assert stats.pools[0].counters.prompt_token_count > 2**20
