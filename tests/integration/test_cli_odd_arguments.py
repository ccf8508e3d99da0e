"""Arguments that nobody means: an answer in one line, or what was asked, and never a traceback."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from raw_caller import RawCaller

pytestmark = pytest.mark.slow

POOL = "odd-arguments"


@pytest.fixture(autouse=True)
def pool(harbor: str) -> Iterator[None]:
    """A pool to name."""
    with RawCaller(harbor) as caller:
        caller.open_pool(POOL)
        yield


def run(harbor: str, *arguments: str | bytes) -> "subprocess.CompletedProcess[str]":
    """Runs a command of kvharbor."""
    command = [sys.executable, "-m", "kvharbor.server.cli", *arguments]
    environment = {**os.environ, "KVHARBOR_SOCKET": harbor}
    return subprocess.run(command, capture_output=True, text=True, timeout=20, env=environment, check=False)


@pytest.mark.parametrize("ids", ["1" * 5000, "99999999999", "\u00b2", "-1"])
def test_what_is_no_token_id_is_told_by_its_place(harbor: str, ids: str) -> None:
    """Too many digits for a number are no id either."""
    failed = run(harbor, "lookup", POOL, "--ids", f"7,{ids}")
    assert (failed.returncode, failed.stdout) == (2, "")
    told = f"kvharbor: --ids: {ids[:40]!r}, number 2, is no token id: write whole numbers below 2^32 like 1,2,3"
    assert failed.stderr.startswith(told)
    assert failed.stderr.count("\n") == 1


@pytest.mark.parametrize("name", [b"\xff\xfe", "é".encode() * 100, b"x" * 200])
def test_exec_runs_commands_whatever_their_name(harbor: str, name: bytes) -> None:
    """A session's name is what of it is text; only the command itself must exist."""
    failed = run(harbor, "exec", "--pool", POOL, "--", b"/nonexistent/" + name)
    assert (failed.returncode, failed.stderr.count("\n")) == (127, 1)
    assert failed.stderr.startswith("kvharbor: cannot run /nonexistent/")
    assert run(harbor, "exec", "--pool", POOL, "--client-name", name[:100], "--", "true").returncode == 0
