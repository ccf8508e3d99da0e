"""`kvharbor watch` over restarts of the service's process, and at the end of the service."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGSEGV

import pytest

from conftest import StartService
from raw_caller import RawCaller
from service_process import DEADLINE_S, ServiceProcess

pytestmark = pytest.mark.slow


@contextmanager
def watching(target: object, *flags: str) -> "Iterator[subprocess.Popen[str]]":
    """Runs the command; kills what a test has left running."""
    command = [sys.executable, "-m", "kvharbor.server.cli", "watch", "p", f"--socket={target}", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def line(process: "subprocess.Popen[str]") -> str:
    """Reads the next line; at the end of the output it is empty."""
    assert process.stdout is not None
    return process.stdout.readline()


def ended(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """Waits for the command's own end; returns its status and what it has said of it."""
    _, told = process.communicate(timeout=DEADLINE_S)
    return process.returncode, told


def publish(service: ServiceProcess) -> None:
    """Opens the pool and leaves two blocks cached."""
    with RawCaller(str(service.socket)) as caller:
        pool_id = caller.open_pool("p")
        caller.commit(pool_id, caller.allocate(pool_id, *range(32)).sequence_id, 32)
    service.wait_for("session ended")


@pytest.mark.parametrize("over", ["socket", "tcp"])
def test_it_goes_on_with_the_next_process(start_fresh: StartService, over: str) -> None:
    """Killed or upgraded: a line says so, and the whole index comes again."""
    service = start_fresh(listen="127.0.0.1:0", anonymous_tenant=f"uid-{os.getuid()}", watch_progress_s="3600")
    publish(service)
    target = service.socket if over == "socket" else service.wait_for("ready")["listen"]
    with watching(target, "--json") as process:
        stored, revision = json.loads(line(process))["stored"], json.loads(line(process))["revision"]
        assert len(stored) == 2
        for restart_count, restart in ((1, service.kill_child), (2, lambda: service.process.send_signal(SIGHUP))):
            restart()
            assert json.loads(line(process)) == {"restart_count": restart_count}
            assert json.loads(line(process))["stored"] == stored
            before, revision = revision, json.loads(line(process))["revision"]
            assert revision > before


def test_a_terminal_is_told_of_the_next_process_and_of_the_end(start_fresh: StartService) -> None:
    """A shutdown ends it with one line and status 1."""
    service = start_fresh()
    publish(service)
    with watching(service.socket) as process:
        index = [line(process), line(process)]
        service.restart_child()
        assert line(process) == "the service's process was replaced: the whole index again\n"
        assert [again.split()[1:] for again in (line(process), line(process))] == [one.split()[1:] for one in index]
        assert service.stop() == 0
        status, told = ended(process)
        assert (status, told.count("\n")) == (1, 1)
        assert "has ended, and the session with it" in told


def test_to_be_interrupted_is_how_it_is_meant_to_end(service: ServiceProcess) -> None:
    """With status 0 and no word."""
    publish(service)
    with watching(service.socket) as process:
        line(process)
        process.send_signal(SIGINT)
        assert ended(process) == (0, "")


def test_a_cold_start_ends_it(start_fresh: StartService, tmp_path: Path) -> None:
    """There is nothing of what was followed any more."""
    path = tmp_path / "a.sock"
    service = start_fresh(socket=path)
    publish(service)
    with watching(path) as process:
        line(process)
        for count in range(3):
            os.kill(service.child_pid, SIGSEGV)
            service.wait_for("ready", count + 2)
        status, told = ended(process)
        assert (status, told.count("\n")) == (1, 1)
        assert "of another epoch" in told
