"""The page that Prometheus scrapes: its form, its names, and that all of them are explained."""

import asyncio
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from kvharbor.gpumem import DataType, Layout, Plane
from kvharbor.server.calls.gate import Gate
from kvharbor.server.calls.timings import Histogram
from kvharbor.server.configuration.settings import Settings
from kvharbor.server.errors import Draining
from kvharbor.server.memory.arenas import HostArenas
from kvharbor.server.metrics.metrics import Metrics
from kvharbor.server.pools.life import Life
from kvharbor.server.pools.pools import Pools
from kvharbor.server.supervision.crash import crash
from kvharbor.server.supervision.keeper import Unkept
from scraping import Scrape

DOCS = Path(__file__).parents[2] / "docs" / "operations.md"
LAYOUT = Layout("m", 16, (Plane.of_tokens("k", 1, 1, 16, DataType.FLOAT32, 16),))


def page() -> Scrape:
    """Returns the page of a service with one pool, in which a bit of everything has happened."""

    async def made() -> str:
        life, keeper, gate = Life.begun(2**20), Unkept(), Gate("0123456789ab")
        life.restarts = {"killed": 2}
        gate.timings.add("Allocate", "OK", 0.003)
        lag = Histogram()
        lag.add(0.2)
        pools = Pools(Settings(), life, keeper, HostArenas(), clock=time.monotonic, crash=crash)
        try:
            await pools.declare('te"nant', "p", LAYOUT, 11 * LAYOUT.block_bytes)
            metrics = Metrics(pools, list, gate, life, loop_lag=lag, version="1.2.3", series_limit=100)
            return (await metrics.page("")).body.decode()
        finally:
            await pools.close(Draining())
            keeper.close()

    return Scrape(asyncio.run(made()))


@pytest.fixture(scope="module")
def scrape() -> Scrape:
    """One page for the module."""
    return page()


def test_every_metric_is_documented(scrape: Scrape) -> None:
    """An operator finds each name with its meaning."""
    text = DOCS.read_text()
    names = [name for name in scrape.families if name.startswith("kvharbor_")]
    assert len(names) > 30
    assert [name for name in names if f"`{name}" not in text] == []


def test_every_documented_metric_exists(scrape: Scrape) -> None:
    """The page does not promise what is not there."""
    documented = set(re.findall(r"^\| `(kvharbor_\w+)", DOCS.read_text(), re.MULTILINE))
    # The reader of the page leaves this ending out of the name of a family.
    known = {name.removesuffix("_total") for name in documented}
    assert known == {name for name in scrape.families if name.startswith("kvharbor_")}


def test_prometheus_finds_nothing_to_complain_of(scrape: Scrape) -> None:
    """Names, units and help texts follow its conventions."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=scrape.text, capture_output=True, text=True, timeout=30
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_labels_are_quoted(scrape: Scrape) -> None:
    """A tenant's name may have any printable character."""
    assert scrape.value("kvharbor_pool_size_blocks", tenant='te"nant', pool="p") == 10


def test_the_usage_ratio_says_what_it_divides(scrape: Scrape) -> None:
    """J2: it is defined in its help text."""
    meaning = scrape.families["kvharbor_pool_usage_ratio"].documentation
    assert meaning.startswith("(reserved + active + warm + quarantined) / size")


def test_the_process_and_its_calls_are_told(scrape: Scrape) -> None:
    """Build, restarts by cause, durations by method and code, lag of the loop, and the process's own memory."""
    assert scrape.value("kvharbor_build_info", version="1.2.3") == 1
    assert scrape.value("kvharbor_restarts_total", cause="killed") == 2
    calls = {"method": "Allocate", "code": "OK"}
    assert scrape.value("kvharbor_rpc_duration_seconds_bucket", **calls, le="0.0025") == 0
    assert scrape.value("kvharbor_rpc_duration_seconds_bucket", **calls, le="0.005") == 1
    assert scrape.value("kvharbor_rpc_duration_seconds_sum", **calls) == 0.003
    assert scrape.value("kvharbor_loop_lag_seconds_count") == 1
    assert scrape.value("process_resident_memory_bytes") > 2**20
    assert scrape.value("kvharbor_ready") == 0
