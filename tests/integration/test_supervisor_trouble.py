"""A supervisor whose child does not do well: it hangs, cannot start, breaks again and again."""

import os
import signal
import subprocess
import sys
import time

import pytest

from conftest import StartService
from integration.supervised import server_info
from raw_caller import RawCaller
from service_process import ServiceProcess
from waiting import until

pytestmark = pytest.mark.slow
STALL = "the process did not run, deadlines are put off"


def test_a_hanging_child_is_replaced(start_fresh: StartService) -> None:
    """E7, the endless variant: whose event loop does not turn for watchdog_s is killed, which is logged and counted."""
    service = start_fresh(watchdog_s="2")
    stopped = service.child_pid
    os.kill(stopped, signal.SIGSTOP)
    assert service.wait_for("service process hangs")["pid"] == stopped
    assert service.wait_for("ready", 2)["restart_count"] == 1
    assert service.wait_for("service process ended")["cause"] == "hung"


def test_a_child_that_was_stopped_for_less_goes_on(start_fresh: StartService) -> None:
    """Silence is no death: it is the same process, and knows that it did not run."""
    service = start_fresh(watchdog_s="20")
    os.kill(service.child_pid, signal.SIGSTOP)
    stopped_at = time.monotonic()
    while time.monotonic() - stopped_at < 1.0:
        os.sched_yield()
    os.kill(service.child_pid, signal.SIGCONT)
    # A busy machine may have had it stalled for less before.
    stalled_s = until(lambda: [entry["stalled_s"] for entry in service.entries(STALL) if entry["stalled_s"] > 0.8])
    assert max(stalled_s) < 5
    info = server_info(service)
    stalls = until(lambda: service.entries(STALL)[: info.stall_count], lambda seen: len(seen) == info.stall_count)
    assert info.restart_count == 0
    total_s = info.stall_time.ToTimedelta().total_seconds()
    assert total_s == pytest.approx(sum(entry["stalled_s"] for entry in stalls), abs=0.01 * len(stalls))


def test_a_restart_that_cannot_start_is_tried_again(start_fresh: StartService) -> None:
    """Ever more slowly, and what is kept stays kept meanwhile: here the port of this life is taken for a while."""
    service = start_fresh(listen="127.0.0.1:0")
    ready = service.wait_for("ready")
    port = int(ready["listen"].rpartition(":")[2])
    command = [sys.executable, "-c", TAKE, str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as taker:
        assert taker.stdout is not None
        assert taker.stdout.readline() == "waits\n"
        service.kill_child()
        assert taker.stdout.readline() == "taken\n"
        service.wait_for("service process ended", 3)
    assert service.wait_for("ready", 2)["epoch"] == ready["epoch"]
    pauses = [entry["restart_pause_s"] for entry in service.entries("service process ended")]
    assert pauses[0] == 0.0
    assert pauses[1:3] == [0.1, 0.2]


TAKE = """
import socket, sys
print("waits", flush=True)
while True:
    try:
        taken = socket.create_server(("127.0.0.1", int(sys.argv[1])))
    except OSError:
        continue
    break
print("taken", flush=True)
sys.stdin.read()
"""


def test_signals_to_the_child_are_the_supervisors_affair(service: ServiceProcess) -> None:
    """A terminal and systemd send theirs to every process of a group: they mean what they mean to the supervisor."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(service.child_pid, number)
    assert server_info(service).restart_count == 0
    assert service.entries("draining") == []


def test_what_breaks_its_process_again_and_again_is_dropped(service: ServiceProcess) -> None:
    """A crash may come of what is kept: after three without a minute of service between, the start is cold."""
    epoch = service.wait_for("ready")["epoch"]
    with RawCaller(str(service.socket)) as caller:
        caller.open_pool("p")
    for count in range(1, 4):
        os.kill(service.child_pid, signal.SIGSEGV)
        ready = service.wait_for("ready", count + 1)
        assert (ready["epoch"] == epoch) == (count < 3)
    assert [entry["cause"] for entry in service.entries("service process ended")] == ["broken"] * 3
    assert len(service.entries("pool recovered")) == 2
    assert (
        len(service.entries("service process broke again and again: what it left is dropped, the next start is cold"))
        == 1
    )
    assert ready["restart_count"] == 0
