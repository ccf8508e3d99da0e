"""Prefixes that an operator wants warm: the engines are processes, the operator is the command."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from integration.client_worker import WorkerProcess
from kvharbor.client import connect

Start = Callable[[], WorkerProcess]
BLOCKS = 16
PREFIX = list(range(64))
IDS = ",".join(str(token) for token in PREFIX)


@pytest.mark.slow
class TestProcesses:
    """Engines are processes, the operator is the command."""

    @pytest.fixture
    def worker(self, target: str, pool_name: str) -> Iterator[Start]:
        """Starts engines on a pool of 16 blocks; ends them with the test."""
        started: list[WorkerProcess] = []

        def start() -> WorkerProcess:
            started.append(WorkerProcess(target, pool_name, block_count=BLOCKS))
            return started[-1]

        yield start
        for process in started:
            process.end()

    @pytest.fixture
    def order(self, target: str, pool_name: str) -> Callable[..., "subprocess.Popen[str]"]:
        """Starts `kvharbor warm` for the prefix."""

        def start(*arguments: str) -> "subprocess.Popen[str]":
            command = [sys.executable, "-m", "kvharbor.server.cli", "warm", pool_name, "greeting", "--ids", IDS]
            return subprocess.Popen(
                [*command, "--socket", target, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )

        return start

    def test_the_command_has_an_engine_compute_and_waits_for_it(
        self, worker: Start, order: Callable[..., "subprocess.Popen[str]"], target: str, pool_name: str
    ) -> None:
        """Without --wait-s it says that an engine is asked; with it, that the prefix is whole."""
        a = worker()
        assert a.claim("none", 0) is None
        out, err = order().communicate(timeout=30)
        assert (out, err) == ("0 tokens pinned as greeting, 64 missing: an engine is to compute them\n", "")
        with order("--wait-s", "30", "--json") as waiting:
            claimed = a.claim("x", 20)
            assert (claimed.cached_tokens, claimed.token_count) == (0, 64)
            a.stamp("x", 0, PREFIX)
            a.commit("x", 64)
            out, _ = waiting.communicate(timeout=30)
        shown = json.loads(out)
        assert (waiting.returncode, shown["pinned_tokens"], shown["missing_tokens"]) == (0, 64, 0)
        a.release("x")
        b = worker()
        assert b.allocate("y", [*PREFIX, 1]).cached_tokens == 64
        assert b.read("y", 0, 64) == PREFIX
        with connect(target) as harbor:
            harbor.find_pool(pool_name).unwarm("greeting")

    def test_a_killed_engines_task_is_finished_by_another(
        self, worker: Start, order: Callable[..., "subprocess.Popen[str]"], target: str, pool_name: str
    ) -> None:
        """kill -9 half-way: what was committed is not computed again, and the operator's wait goes on."""
        a, b = worker(), worker()
        with order("--wait-s", "30") as waiting:
            assert a.claim("x", 20).token_count == 64
            a.stamp("x", 0, PREFIX[:40])
            a.commit("x", 40)
            a.kill()
            claimed = b.claim("x", 20)
            assert (claimed.cached_tokens, claimed.computed_tokens) == (32, 32)
            assert b.read("x", 0, 32) == PREFIX[:32]
            b.stamp("x", 32, PREFIX[32:])
            b.commit("x", 64)
            out, err = waiting.communicate(timeout=30)
        assert (waiting.returncode, out, err) == (0, "64 tokens pinned as greeting, 0 missing\n", "")
        with connect(target) as harbor:
            harbor.find_pool(pool_name).unwarm("greeting")
