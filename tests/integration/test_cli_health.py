"""`kvharbor health`: a status for probes, and why there is no answer."""

import socket as sockets
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Runs the command."""
    command = [sys.executable, "-m", "kvharbor.server.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_health_is_a_status(harbor: str) -> None:
    """For probes: 0 when ready, 1 when nobody answers, and quickly."""
    healthy = run("health", "--socket", harbor)
    assert (healthy.returncode, healthy.stdout) == (0, "SERVING\n")
    dead = run("health", "--socket", "/nonexistent/a.sock")
    assert dead.returncode == 1
    assert dead.stderr.startswith("kvharbor: no answer at unix:/nonexistent/a.sock: there is no such socket")


def test_health_tells_why_nobody_answers(tmp_path: Path) -> None:
    """A socket that a dead service has left, and something that is none."""
    left, file = tmp_path / "left.sock", tmp_path / "file.sock"
    with sockets.socket(sockets.AF_UNIX) as unheard:
        unheard.bind(str(left))
    file.touch()
    for path in (left, file):
        dead = run("health", "--socket", str(path))
        assert (dead.returncode, dead.stderr.count("\n")) == (1, 1)
        assert f"no answer at unix:{path}: nobody listens there" in dead.stderr
