"""J2: five thousand tenants make no more series than stated, and a scrape of them is quick."""

import asyncio
import resource
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from kvharbor.gpumem import DataType, Layout, Plane
from kvharbor.pool import Engine, Prompt
from kvharbor.pool.steps import finish
from kvharbor.server.calls.gate import Gate
from kvharbor.server.calls.timings import Histogram
from kvharbor.server.configuration.settings import Settings
from kvharbor.server.errors import Draining
from kvharbor.server.memory.arenas import HostArenas
from kvharbor.server.metrics.engine_families import SERIES_AN_ENGINE
from kvharbor.server.metrics.http_port import HttpPort
from kvharbor.server.metrics.metrics import Metrics
from kvharbor.server.metrics.pool_figures import BLOCKS, COUNTERS, GAUGES
from kvharbor.server.metrics.traffic_families import SERIES_A_POOL
from kvharbor.server.pools.life import Life
from kvharbor.server.pools.pools import Pools
from kvharbor.server.process.listen import listen_http
from kvharbor.server.supervision.crash import crash
from kvharbor.server.supervision.keeper import Unkept
from scraping import Scrape

POOL_COUNT = 1_000
TENANTS_A_POOL = 5
TENANT_COUNT = POOL_COUNT * TENANTS_A_POOL
LIMIT = 100
MOST_SCRAPE_S = 0.25
MOST_STEP_S = 0.05
LAYOUT = Layout("m", 16, (Plane.of_tokens("k", 1, 1, 16, DataType.FLOAT32, 16),))


class _Forgetful(Unkept):
    """Keeps nothing: nobody comes after this test, and duplicates of all descriptors are too many."""

    def keep(self, name: str, meta: dict[str, Any], fds: Iterable[int] = ()) -> None:
        pass


@pytest.fixture
def _many_descriptors() -> Iterator[None]:
    """Each pool has two memory files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * POOL_COUNT + 500
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"{needed} file descriptors are needed, the hard limit is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def _make_pools(pools: Pools) -> None:
    """Makes the pools, with an allocation for each tenant; the last pool is the largest."""
    for number in range(POOL_COUNT):
        block_count = 1 + TENANTS_A_POOL + (number == POOL_COUNT - 1)
        served, _ = await pools.declare(f"tenant-{number}.0", "p", LAYOUT, block_count * LAYOUT.block_bytes)
        for each in range(TENANTS_A_POOL):
            served.pool.open_session(each + 1, f"tenant-{number}.{each}", Engine(f"engine-{number}", "1", str(each)))
            finish(served.pool.allocate(each + 1, Prompt(b"\1\0\0\0")))


async def _get(address: str) -> bytes:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return answer.partition(b"\r\n\r\n")[2]


async def _scraped(pools: Pools, life: Life) -> tuple[Scrape, float, float]:
    """Returns a scrape, what the quickest of five took, and the longest step of the best of five others.

    In seconds of this process's own: both ends of the scrape are in it, and never wait for anything else.
    """
    metrics = Metrics(pools, list, Gate("0123456789ab"), life, loop_lag=Histogram(), version="1", series_limit=LIMIT)
    listener, address = listen_http("127.0.0.1:0")
    port = HttpPort(listener, {"/metrics": metrics.page})
    await port.start()
    took_s, body = [], b""
    for _ in range(5):
        began_at = time.process_time()
        body = await _get(address)
        took_s.append(time.process_time() - began_at)
    longest_s = [await _longest_step_s(metrics) for _ in range(5)]
    await port.close()
    return Scrape(body.decode()), min(took_s), min(longest_s)


async def _longest_step_s(metrics: Metrics) -> float:
    """Makes a page and returns the longest time for which it kept the event loop."""
    page, longest_s = asyncio.create_task(metrics.page("")), 0.0
    while not page.done():
        began_at = time.process_time()
        await asyncio.sleep(0)
        longest_s = max(longest_s, time.process_time() - began_at)
    return longest_s


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.usefixtures("_many_descriptors")
def test_five_thousand_tenants_make_a_bounded_scrape() -> None:
    """J2: 100 tenants, pools and engines have series, the rest are summed under "other"; a scrape takes < 250 ms."""

    async def run() -> tuple[Scrape, float, float]:
        life = Life.begun(2**30)
        pools = Pools(Settings(), life, _Forgetful(), HostArenas(), clock=time.monotonic, crash=crash)
        try:
            await _make_pools(pools)
            return await _scraped(pools, life)
        finally:
            await pools.close(Draining())

    scrape, took_s, longest_s = asyncio.run(run())
    figure_count = len(BLOCKS) + len(GAUGES) + len(COUNTERS)
    assert len(scrape.values("kvharbor_pool_size_blocks")) == LIMIT + 1
    assert len(scrape.values("kvharbor_tenant_sequences")) == LIMIT + 1
    assert len(scrape.values("kvharbor_engine_sessions")) == LIMIT + 1
    assert len(scrape) < (LIMIT + 1) * (figure_count + 1 + SERIES_A_POOL + 4 + SERIES_AN_ENGINE) + 100
    largest = scrape.value("kvharbor_pool_size_blocks", tenant=f"tenant-{POOL_COUNT - 1}.0", pool="p")
    assert largest == TENANTS_A_POOL + 1
    assert (
        scrape.value("kvharbor_pool_size_blocks", tenant="other", pool="other") == TENANT_COUNT - LIMIT * TENANTS_A_POOL
    )
    assert sum(scrape.values("kvharbor_pool_size_blocks").values()) == TENANT_COUNT + 1
    assert sum(scrape.values("kvharbor_tenant_sequences").values()) == TENANT_COUNT
    assert sum(scrape.values("kvharbor_engine_sessions").values()) == TENANT_COUNT
    assert sum(scrape.values("kvharbor_engine_prompt_tokens_total").values()) == TENANT_COUNT
    assert sum(scrape.values("kvharbor_pool_blocks", **{"class": "reserved"}).values()) == TENANT_COUNT
    assert took_s < MOST_SCRAPE_S
    # Calls are served between any two steps.
    assert longest_s < MOST_STEP_S
