"""`kvharbor stats`: one consistent snapshot, whole on any terminal, and no guess where nothing is told."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest

from conftest import StartService
from kvharbor.v1 import cache_service_pb2 as cache
from raw_caller import RawCaller, tokens
from service_process import DEADLINE_S

pytestmark = pytest.mark.slow

STATS = (sys.executable, "-m", "kvharbor.server.cli", "stats")
TENANT = f"uid-{os.getuid()}"


def run(socket: object, *arguments: str, columns: int = 120) -> "subprocess.CompletedProcess[str]":
    """Runs the command."""
    command = [*STATS, *arguments, f"--socket={socket}"]
    environment = {**os.environ, "COLUMNS": str(columns)}
    return subprocess.run(command, capture_output=True, text=True, timeout=30, env=environment, check=False)


def names_in(shown: str) -> list[str]:
    """Returns the pools in the heads of all tables, as they stand there."""
    heads = [line for line in shown.splitlines() if re.match("┃ pool +┃", line)]
    return [cell.strip() for head in heads for cell in head.strip("┃").split("┃")[1:]]


def test_the_session_that_asks_does_not_count(start_fresh: StartService) -> None:
    """Nobody else is there, then one is."""
    socket = str(start_fresh().socket)
    assert run(socket).stdout == "no pools; 0 sessions\n"
    with RawCaller(socket):
        assert run(socket).stdout == "no pools; 1 session\n"
        assert json.loads(run(socket, "--json").stdout) == {"pools": [], "session_count": 1}


def test_there_is_a_table_or_json(harbor: str) -> None:
    """One row a class for people, the API's names for programs."""
    with RawCaller(harbor) as caller:
        pool_id = caller.open_pool("in-stats")
        request = cache.AllocateRequest(pool_id=pool_id, token_ids=tokens(*range(32)))
        caller.commit(pool_id, caller.call(caller.cache.Allocate, request).sequence.sequence_id, 32)
    table = run(harbor, "in-stats")
    assert (table.returncode, table.stderr) == (0, "")
    assert "cached blocks" in table.stdout
    assert "1 never seen" in table.stdout
    assert re.search(rf"┃ tenant +┃ +{TENANT} ┃", table.stdout)
    shown = json.loads(run(harbor, "--json", "in-stats").stdout)["pools"][0]
    assert (shown["name"], shown["total_block_count"], shown["cached_block_count"]) == ("in-stats", 64, 2)
    assert shown["tenant"] == TENANT
    assert shown["traffic"]["misses"]["never_seen"] == 1


@pytest.mark.parametrize(("columns", "tables"), [(80, 6), (130, 3), (400, 1)])
def test_pools_have_as_many_tables_as_the_terminal_needs(start_fresh: StartService, columns: int, tables: int) -> None:
    """Each pool is whole, in order, in one of them."""
    names = [f"pool-{number:02}" for number in range(11)]
    socket = start_fresh(memory="64MiB").socket
    with RawCaller(str(socket)) as caller:
        for name in names:
            caller.open_pool(name)
        shown = run(socket, columns=columns).stdout
    assert names_in(shown) == names
    assert shown.count("quarantined blocks") == shown.count("refused calls") == tables
    assert shown.count("64 (64.0 KiB)") == 2 * len(names)
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= columns


def test_a_name_as_wide_as_the_terminal_is_folded(start_fresh: StartService) -> None:
    """Nothing of it is left out."""
    socket = start_fresh().socket
    with RawCaller(str(socket)) as caller:
        caller.open_pool("n" * 64)
        shown = run(socket, columns=60).stdout
    head = shown[: shown.index("free")]
    assert ("".join(re.findall("nn+", head)), "…" in shown) == ("n" * 64, False)


@pytest.mark.parametrize("arguments", [(), ("--json",), ("unheard-of",)])
def test_without_a_session_it_does_not_say_that_there_are_no_pools(
    start_fresh: StartService, arguments: Sequence[str]
) -> None:
    """Over TCP, where the service tells of none."""
    service = start_fresh(listen="127.0.0.1:0")
    with RawCaller(str(service.socket)) as caller:
        caller.open_pool("p")
        failed = run(service.wait_for("ready")["listen"], *arguments)
    assert (failed.returncode, failed.stdout, failed.stderr.count("\n")) == (1, "", 1)
    assert "name the Unix socket of the service" in failed.stderr
    assert "anonymous_tenant" in failed.stderr


def test_without_a_session_it_shows_the_pools_of_the_anonymous_tenant(start_fresh: StartService) -> None:
    """Of which there may be none: that is told then, and an unknown name."""
    service = start_fresh(listen="127.0.0.1:0", anonymous_tenant=TENANT)
    listen = service.wait_for("ready")["listen"]
    assert run(listen).stdout == "no pools; 0 sessions\n"
    with RawCaller(str(service.socket)) as caller:
        caller.open_pool("p")
        assert names_in(run(listen).stdout) == ["p"]
        assert "no pool is named 'unheard-of'" in run(listen, "unheard-of").stderr


@pytest.mark.parametrize(("arguments", "last"), [((), "refused calls"), (("--json",), "}")])
def test_it_goes_on_until_interrupted(harbor: str, arguments: Sequence[str], last: str) -> None:
    """Which is how it is meant to end: with status 0."""
    command = [*STATS, "--watch", "--interval-s=0.1", f"--socket={harbor}", *arguments]
    # As on a high terminal: each snapshot is drawn, and whole.
    environment = {**os.environ, "FORCE_COLOR": "1", "LINES": "500"}
    with RawCaller(harbor) as caller:
        caller.open_pool("watched")
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            for _ in range(3):
                while last not in process.stdout.readline():
                    assert process.poll() is None
            process.send_signal(signal.SIGINT)
            # Not by `communicate`, which knows nothing of the half of a letter that has been read ahead.
            process.stdout.read()
            told = process.stderr.read()
            assert (process.wait(DEADLINE_S), told) == (0, "")
