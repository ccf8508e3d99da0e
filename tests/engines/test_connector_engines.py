"""Real vLLM engines with the connector: the same answers as plain vLLM, and prefixes from the pool."""

import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvharbor.client import Pool, PoolStats, connect
from kvharbor.engines.transformers import ModelMissing, smollm2_folder
from kvharbor.engines.vllm_connector import connector_args
from service_process import ServiceProcess

StartService = Callable[..., ServiceProcess]
pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(600)]

ENGINE = Path(__file__).with_name("connector_engine.py")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
BLOCK_TOKENS = 64
BLOCK_BYTES = 46080 * BLOCK_TOKENS
"""Of SmolLM2 in fp32."""
CHOSEN = random.Random(4)
TEXTS = [[CHOSEN.randrange(100, 40_000) for _ in range(372)] for _ in range(6)]


class Engine:
    """connector_engine.py."""

    def __init__(self, arguments: dict[str, Any], **environment: str) -> None:
        settings = {"model": str(_model()), "arguments": {"dtype": "float32", **arguments}}
        self.process = subprocess.Popen(
            [sys.executable, str(ENGINE), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **ENVIRONMENT, **environment},
        )

    def line(self) -> dict[str, Any]:
        """The next thing that it says."""
        assert self.process.stdout is not None
        line: dict[str, Any] = json.loads(self.process.stdout.readline())
        return line

    def ask(self, prompts: list[list[int]], new_tokens: int = 12) -> None:
        """Asks, and returns when it has begun."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "new_tokens": new_tokens}) + "\n")
        self.process.stdin.flush()
        assert self.line() == {"begun": True}

    def answer(self, prompts: list[list[int]], new_tokens: int = 12) -> tuple[list[list[int]], list[int]]:
        """Returns the answers, and how many tokens of each prompt vLLM calls cached."""
        self.ask(prompts, new_tokens)
        line = self.line()
        return line["answers"], line["cached"]

    def end(self, *, kill: bool = False) -> None:
        """Ends it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if kill:
            self.process.kill()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def _model() -> Path:
    try:
        return smollm2_folder()
    except ModelMissing as missing:
        pytest.skip(str(missing))


@pytest.fixture
def start(service: ServiceProcess) -> Iterator[Callable[..., Engine]]:
    """Starts an engine on the pool, of so many blocks; the first word is taken, if it is not refused."""
    engines: list[Engine] = []

    def started(block_count: int = 60, dtype: str = "float32", **environment: str) -> Engine:
        arguments = connector_args(str(service.socket), "p", size=block_count * BLOCK_BYTES, model="smollm2")
        engines.append(Engine({**arguments, "dtype": dtype}, **environment))
        return engines[-1]

    yield started
    for engine in engines:
        engine.end()


@pytest.fixture
def service(start_fresh: StartService, tmp_path: Path) -> ServiceProcess:
    """A service with room for the pool."""
    return start_fresh(memory="256MiB", socket=tmp_path / "kv.sock")


@pytest.fixture(scope="module")
def plain() -> Iterator[Callable[[list[list[int]]], list[list[int]]]]:
    """What vLLM says without prefix cache, each prompt alone."""
    engine = Engine({"block_size": BLOCK_TOKENS, "enable_prefix_caching": False})
    assert engine.line() == {"ready": True}

    def said(prompts: list[list[int]], new_tokens: int = 12) -> list[list[int]]:
        return [engine.answer([prompt], new_tokens)[0][0] for prompt in prompts]

    yield said
    engine.end()


@contextlib.contextmanager
def opened(service: ServiceProcess) -> Iterator[Pool]:
    """The engines' pool, opened by the test."""
    with connect(service.target) as harbor:
        (info,) = harbor.list_pools()
        assert info.layout is not None
        pool = harbor.open_pool(info.name, info.layout)
        yield pool


def at_rest(pool: Pool) -> PoolStats:
    """The pool once nothing is held in it."""
    while True:
        stats = pool.stats()
        if not (stats.reserved_block_count or stats.active_block_count or stats.quarantined_block_count):
            return stats


def test_the_second_engine_begins_warm(
    service: ServiceProcess, start: Callable[..., Engine], plain: Callable[..., Any]
) -> None:
    """What one engine has computed another loads, in another process of vLLM's too; both say what plain vLLM says."""
    first, second = start(), start(VLLM_ENABLE_V1_MULTIPROCESSING="1")
    assert [engine.line() for engine in (first, second)] == [{"ready": True}] * 2
    prompts = [TEXTS[0], TEXTS[0] + TEXTS[1][:100], TEXTS[1]]
    expected = plain(prompts)
    assert first.answer(prompts[:1]) == (expected[:1], [0])
    assert second.answer(prompts[:1]) == (expected[:1], [320])
    assert second.answer(prompts[1:]) == (expected[1:], [320, 0])
    assert first.answer(prompts[1:]) == (expected[1:], [448, 320])
    with opened(service) as pool:
        assert at_rest(pool).cached_block_count == 5 + 2 + 5
        # V and K of every block become something else: who loads them says so.
        first.answer(TEXTS[2:3])
        memory = pool.views.torch_bytes()
        memory.copy_(memory.flip(0))
        answers, cached = second.answer(TEXTS[2:3])
        assert cached == [320]
        assert answers != plain(TEXTS[2:3])
        del memory


def test_a_killed_engine_leaves_what_it_has_stored(
    service: ServiceProcess, start: Callable[..., Engine], plain: Callable[..., Any]
) -> None:
    """kill -9 in the middle of a batch: leases end, stored blocks stay, and the other engine loads them."""
    first, second = start(), start()
    assert [engine.line() for engine in (first, second)] == [{"ready": True}] * 2
    first.ask(TEXTS, 300)
    with opened(service) as pool:
        while pool.stats().counters.committed_block_count < 6:
            assert first.process.poll() is None
        first.end(kill=True)
        at_rest(pool)
        answers, cached = second.answer(TEXTS)
        assert answers == plain(TEXTS)
        assert sum(cached) >= 320
        at_rest(pool)


def test_engines_go_on_without_the_service_and_in_a_new_epoch(
    service: ServiceProcess, start: Callable[..., Engine], plain: Callable[..., Any], start_fresh: StartService
) -> None:
    """The service's process is killed, then all of it: answers are the same, computed where nothing can be loaded."""
    engine = start()
    assert engine.line() == {"ready": True}
    expected = plain(TEXTS)
    engine.ask(TEXTS)
    service.restart_child()
    assert engine.line()["answers"] == expected
    engine.ask(TEXTS[::-1])
    service.kill()
    start_fresh(memory="256MiB", socket=service.socket)
    assert engine.line()["answers"] == expected[::-1]
    assert engine.answer(TEXTS)[0] == expected


def test_a_tight_pool_takes_what_fits(
    service: ServiceProcess, start: Callable[..., Engine], plain: Callable[..., Any]
) -> None:
    """Two engines and a pool of 7 blocks: what does not fit is not stored, nobody waits, and all texts are right."""
    engines = [start(8), start(8)]
    assert [engine.line() for engine in engines] == [{"ready": True}] * 2
    prompts = [TEXTS[number % 4][: 100 + 60 * number] for number in range(8)]
    expected = plain(prompts)
    for engine in engines:
        engine.ask(prompts)
    assert [engine.line()["answers"] for engine in engines] == [expected] * 2
    with opened(service) as pool:
        assert at_rest(pool).counters.evicted_block_count > 0


def test_another_type_is_refused_by_name(start: Callable[..., Engine]) -> None:
    """K and V of another type: the engine does not start, and says in what the pool differs."""
    assert start().line() == {"ready": True}
    refused = start(dtype="bfloat16").line()["refused"]
    assert "LayoutMismatch" in refused
    assert "data_type" in refused
