"""Who computes in a pool and what each engine reuses of whom, with real processes [U1] [U2] [U3]."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import StartService
from kvharbor.client import Engine, EngineStats, InvalidField, PoolStats, aio, connect
from raw_caller import RawCaller
from scraping import scrape
from service_process import ServiceProcess
from session_worker import SessionWorker
from waiting import until

pytestmark = pytest.mark.slow
VLLM, SGLANG = Engine("vllm", "0.32.0", "chat-a"), Engine("sglang", "0.5.23", "chat-b")

_BEGIN = """
from kvharbor.client import Chain, CommitChain, Engine, connect
from kvharbor.gpumem import DataType, Layout, Plane
layout = Layout("m", 16, (Plane.of_tokens("k", 1, 1, 16, DataType.FLOAT32, 16),))
harbor = connect(path, engine=Engine(*engine))
pool = harbor.open_pool(pool_name, layout, 33 * layout.block_bytes)

def serve(tokens):
    sequence = pool.allocate(tokens)
    sequence.commit(len(tokens))
    sequence.release()
    return sequence.cached_tokens

def serve_blocks(tokens):
    (found,) = pool.blocks.acquire([Chain(tokens=tokens, table_block_count=len(tokens) // 16, computes=True)])
    rest = tokens[16 * len(found.held):]
    if rest:
        pool.blocks.commit([CommitChain(blocks=found.leased, parent=found.held[-1:], tokens=rest)])
    pool.blocks.release(found.held)
    pool.blocks.release(found.leased)
    pool.blocks.flush()
    return 16 * len(found.held)
"""


class EngineProcess(SessionWorker):
    """A process with the client, as one engine or another."""

    def __init__(self, path: Path, engine: Engine, pool_name: str) -> None:
        super().__init__(path, without_session=True)
        self.run(_BEGIN, path=str(path), engine=[engine.name, engine.version, engine.instance], pool_name=pool_name)

    def serve(self, first: int, count: int) -> int:
        """Takes a prompt through its life, by a sequence; returns what it has reused."""
        reused: int = self.run("result = serve(list(range(first, first + count)))", first=first, count=count)
        return reused

    def serve_blocks(self, first: int, count: int) -> int:
        """Does so by block calls."""
        reused: int = self.run("result = serve_blocks(list(range(first, first + count)))", first=first, count=count)
        return reused


Start = Callable[[Engine], EngineProcess]
Stats = Callable[[], PoolStats]


@pytest.fixture(scope="module")
def service(start_service: StartService) -> ServiceProcess:
    """One service for the module; each test has a pool of its own there."""
    return start_service(metrics_listen="127.0.0.1:0")


@pytest.fixture
def engine(service: ServiceProcess, pool_name: str) -> Iterator[Start]:
    """Starts engines on the pool; ends them with the test."""
    started: list[EngineProcess] = []

    def start(what: Engine) -> EngineProcess:
        started.append(EngineProcess(service.socket, what, pool_name))
        return started[-1]

    yield start
    for process in started:
        process.close()


@pytest.fixture
def stats(service: ServiceProcess, pool_name: str) -> Iterator[Stats]:
    """Asks for the pool's figures."""
    with connect(str(service.socket)) as harbor:
        yield lambda: harbor.stats(pool_name).pools[0]


def matrix(pool: PoolStats) -> dict[tuple[str, str], int]:
    """Tokens by (who reuses, who has published); the sums are those of the pool's own counters."""
    assert sum(one.prompt_token_count for one in pool.engines) == pool.counters.prompt_token_count
    assert sum(one.reused_token_count for one in pool.engines) == pool.counters.reused_token_count
    assert sum(one.committed_block_count for one in pool.engines) == sum(
        one.committed_block_count for one in pool.tenants
    )
    names = [one.group or one.engine.name for one in pool.engines]
    found = {
        (names[place], names[reuse.engine_index]): reuse.token_count
        for place, one in enumerate(pool.engines)
        for reuse in one.reuses
    }
    assert sum(found.values()) == pool.counters.reused_token_count
    return found


def of(pool: PoolStats, engine: Engine) -> EngineStats:
    """One engine's part."""
    (found,) = [one for one in pool.engines if one.engine == engine and not one.group]
    return found


def test_one_engine_reuses_what_another_has_committed(engine: Start, stats: Stats) -> None:
    """By sequences and by block calls, each of the other's kind too."""
    first, second = engine(VLLM), engine(SGLANG)
    assert [first.serve(0, 65), second.serve(0, 65), second.serve(0, 65)] == [0, 64, 64]
    assert [second.serve_blocks(1000, 32), first.serve_blocks(1000, 48), first.serve(1000, 49)] == [0, 32, 48]
    pool = stats()
    assert matrix(pool) == {("sglang", "vllm"): 128, ("vllm", "sglang"): 64, ("vllm", "vllm"): 16}
    assert [one.engine for one in pool.engines] == [SGLANG, VLLM]
    assert (of(pool, VLLM).session_count, of(pool, VLLM).committed_block_count) == (1, 4 + 1)
    assert of(pool, VLLM).held_block_count == 0


def test_an_engine_that_only_copies_counts_if_it_says_that_it_uses_what_it_gets(engine: Start, stats: Stats) -> None:
    """[U2] Who asks what there is, perhaps again and again, is no request."""
    first, second = engine(VLLM), engine(SGLANG)
    first.serve(0, 48)
    ask = """
(found,) = pool.blocks.acquire([Chain(tokens=list(range(48)), uses=uses)])
pool.blocks.release(found.held)
pool.blocks.flush()
result = len(found.held)
"""
    assert second.run(ask, uses=False) == 3
    assert matrix(stats()) == {}
    assert second.run(ask, uses=True) == 3
    pool = stats()
    assert matrix(pool) == {("sglang", "vllm"): 48}
    assert of(pool, SGLANG).prompt_token_count == 48


def test_an_engine_that_dies_stays_with_what_it_has_published(engine: Start, stats: Stats) -> None:
    """And is the same one when it starts again under its name."""
    first, second = engine(VLLM), engine(SGLANG)
    first.serve(0, 33)
    first.kill()
    until(lambda: of(stats(), VLLM).session_count, lambda count: count == 0)
    assert second.serve(0, 33) == 32
    assert engine(VLLM).serve(0, 33) == 32
    pool = stats()
    assert matrix(pool) == {("sglang", "vllm"): 32, ("vllm", "vllm"): 32}
    assert of(pool, VLLM).session_count == 1


def test_after_a_kill_of_the_service_what_was_there_is_of_an_earlier_process(
    service: ServiceProcess, engine: Start, stats: Stats
) -> None:
    """Counts begin anew, as all do; sessions are the engines that they were."""
    first, second = engine(VLLM), engine(SGLANG)
    first.serve(0, 33)
    service.restart_child()
    assert second.serve(0, 49) == 32
    assert first.serve(0, 49) == 48
    pool = stats()
    assert matrix(pool) == {("sglang", "earlier process"): 32, ("vllm", "earlier process"): 32, ("vllm", "sglang"): 16}
    assert [(one.group, one.committed_block_count) for one in pool.engines] == [
        ("", 1),
        ("", 0),
        ("earlier process", 2),
    ]
    assert [of(pool, each).session_count for each in (VLLM, SGLANG)] == [1, 1]


def test_people_read_names_versions_and_shares(service: ServiceProcess, engine: Start, pool_name: str) -> None:
    """As text and as JSON, in stats and in the list of sessions."""
    first, second = engine(VLLM), engine(SGLANG)
    first.serve(0, 65)
    second.serve(0, 65)

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "kvharbor.server.cli", *arguments, "--socket", str(service.socket)]
        environment = {**os.environ, "COLUMNS": "160"}
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30, env=environment).stdout

    text = run("stats", pool_name)
    assert f"engines of {pool_name}" in text
    assert re.search(
        r"│ sglang 0\.5\.23 chat-b +│ +1 │ +0 │ +0 │ +65 │ +64 \(98%\) │\n│   of vllm 0\.32\.0 chat-a +│.* 64 │", text
    )
    shown = json.loads(run("stats", "--json", pool_name))["pools"][0]["engines"]
    assert shown[0]["engine"] == {"name": "sglang", "version": "0.5.23", "instance": "chat-b"}
    assert shown[0]["reuses"] == [{"engine_index": 1, "token_count": 64}]
    assert "vllm 0.32.0 chat-a" in run("sessions")
    assert {"vllm", "sglang"} <= {each["engine"]["name"] for each in json.loads(run("sessions", "--json"))}


def test_prometheus_has_pairs_of_engines_by_name(service: ServiceProcess, engine: Start) -> None:
    """Sessions, prompt tokens and published blocks of each, and reused tokens by who has published them."""
    first, second = engine(Engine("first", "1")), engine(Engine("second", "1"))
    first.serve(0, 33)
    second.serve(0, 33)
    seen = scrape(service.entries("ready")[-1]["metrics_listen"])
    assert seen.value("kvharbor_engine_reused_tokens_total", engine="second", of="first") == 32
    assert seen.value("kvharbor_engine_prompt_tokens_total", engine="first") == 33
    assert seen.value("kvharbor_engine_committed_blocks", engine="first") == 2
    assert seen.value("kvharbor_engine_sessions", engine="second") == 1


def test_who_says_nothing_is_named_by_client_and_process(harbor: str) -> None:
    """An older client, or one that has nothing to say: library, version, and client_name or pid."""
    with connect(harbor, client_name="worker-7") as named, connect(harbor) as nameless, RawCaller(harbor) as raw:
        engines = {session.session_id: session.engine for session in named.list_sessions()}
    assert engines[named.session_id].name == "kvharbor-python"
    assert engines[named.session_id].instance == "worker-7"
    assert engines[nameless.session_id].instance == f"pid {os.getpid()}"
    assert engines[raw.welcome.session_id] == Engine("raw", "", "test")


@pytest.mark.parametrize(
    ("engine", "field"),
    [
        (Engine(name="x" * 65), "engine.name"),
        (Engine("x", "1\n"), "engine.version"),
        (Engine("x", "1", "\x1b[31m"), "engine.instance"),
        (Engine("x", "1", "é" * 65), "engine.instance"),
    ],
)
def test_names_that_nobody_could_read_are_refused(harbor: str, engine: Engine, field: str) -> None:
    """Too long, or with signs that are not printed."""
    with pytest.raises(InvalidField) as refused:
        connect(harbor, engine=engine)
    assert refused.value.metadata["field"] == field


def test_an_engine_is_no_text(harbor: str) -> None:
    """Name and version are told apart."""
    with pytest.raises(InvalidField, match="engine is 'vllm', must be an Engine"):
        connect(harbor, engine="vllm")  # type: ignore[arg-type]


def test_the_asyncio_client_says_it_too(harbor: str) -> None:
    """As the other one."""

    async def told() -> list[Engine]:
        async with aio.connect(harbor, engine=VLLM) as opened:
            return [each.engine for each in await opened.list_sessions() if each.session_id == opened.session_id]

    assert asyncio.run(told()) == [VLLM]
