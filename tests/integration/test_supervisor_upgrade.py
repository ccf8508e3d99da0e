"""Upgrades: in order, to what cannot start, and from what is not ready. And recoveries that hang."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest

import start_hooks
from conftest import StartService
from integration.supervised import server_info
from kvharbor.v1 import cache_service_pb2 as cache
from process_tree import open_files
from raw_caller import RawCaller, refused
from service_process import DEADLINE_S, ServiceProcess
from waiting import until

pytestmark = pytest.mark.slow
GIVEN_UP = "upgrade given up: the new process does not start, the old one goes on"
STAYS = "setting differs from the one in force, which stays until a cold start"

# Recovering a pool waits while the file "wait" is there, and stands still where "hang" is.
SLOW_RECOVERY = """
import os, signal, sys, time

def recovered(*arguments, **named):
    with open(os.path.join({folder!r}, "begun"), "a") as begun:
        print(os.getpid(), file=begun)
    if os.path.exists(os.path.join({folder!r}, "hang")):
        os.kill(os.getpid(), signal.SIGSTOP)
    while os.path.exists(os.path.join({folder!r}, "wait")):
        time.sleep(0.01)
    return recover(*arguments, **named)

if "kvharbor.server.child" in sys.orig_argv:
    from kvharbor.pool import Pool
    recover, Pool.recovered = Pool.recovered, recovered
"""


class Recovering:
    """A service with a pool, whose recoveries the test holds up."""

    def __init__(self, start: StartService, folder: Path, **flags: str) -> None:
        self._folder = folder
        environment = start_hooks.environment(folder / "hook", SLOW_RECOVERY.format(folder=str(folder)))
        self.service = start(environment=environment, **flags)
        with RawCaller(str(self.service.socket)) as caller:
            caller.open_pool("p")

    def hold(self, how: str) -> None:
        """Holds recoveries up from now on: "wait" or "hang"."""
        (self._folder / how).touch()

    def let_go(self) -> None:
        """Lets the recovery that waits, and those to come, go on."""
        (self._folder / "wait").unlink()

    def begun(self, count: int) -> int:
        """Waits for so many recoveries to have begun; returns the pid of the last."""
        begun = self._folder / "begun"
        pids = until(lambda: begun.read_text().split() if begun.exists() else [], lambda found: len(found) >= count)
        return int(pids[-1])


def upgrade(service: ServiceProcess) -> "subprocess.CompletedProcess[str]":
    """Runs the command."""
    command = [sys.executable, "-m", "kvharbor.server.cli", "upgrade", f"--socket={service.socket}"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)


def memfds_of(pid: int, name: str) -> list[Path]:
    """Returns the anonymous files of a process that have a name."""
    return [entry for entry, file in open_files(pid).items() if file.startswith(f"/memfd:{name} ")]


def test_an_upgrade_is_a_restart_in_order(start_fresh: StartService, tmp_path: Path) -> None:
    """SIGHUP: the new process is there before the old one goes, with the settings as they are now; blocks stay."""
    config = tmp_path / "kvharbor.toml"
    config.write_text('grace_s = 4.0\nmemory = "8MiB"\n')
    service = start_fresh(environment={"KVHARBOR_CONFIG": str(config)}, memory="16MiB")
    path = str(service.socket)
    with RawCaller(path) as caller:
        pool_id = caller.open_pool("p")
        stream = caller.cache.Watch(cache.WatchRequest(pool_id=pool_id), metadata=caller.metadata)
        next(stream)
        config.write_text('grace_s = 3.0\nmemory = "8MiB"\n')
        service.process.send_signal(signal.SIGHUP)
        with refused() as found:
            list(stream)
        assert (found[0].code, found[0].reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        ready = service.wait_for("ready", 2)
    assert (ready["epoch"], ready["restart_count"]) == (service.wait_for("ready")["epoch"], 1)
    ended = service.wait_for("service process ended")
    assert (ended["cause"], ended["status"], ended["restart_pause_s"], ended["level"]) == ("upgraded", 0, 0.0, "info")
    assert service.entries("draining")[0]["grace_s"] == 4.0
    with RawCaller(path) as caller:
        assert caller.open_pool("p") == pool_id
    assert service.stop() == 0
    assert service.entries("draining")[1]["grace_s"] == 3.0


def test_settings_that_stay_until_a_cold_start_are_told(tmp_path: Path) -> None:
    """In the log, by the command and to whoever asks. An address where there was none is none of them."""
    config = tmp_path / "kvharbor.toml"
    config.write_text('memory = "64MiB"\n')
    with ServiceProcess(tmp_path / "kv.sock", environment={"KVHARBOR_CONFIG": str(config)}) as service:
        service.wait_for("ready")
        config.write_text('memory = "64MiB"\nlisten = "127.0.0.1:0"\n')
        first = upgrade(service)
        assert (first.returncode, first.stderr, list(server_info(service).kept_settings)) == (0, "", [])
        config.write_text('memory = "128MiB"\nlisten = "127.0.0.1:1"\n')
        second = upgrade(service)
        sizes = ("67108864 bytes (64.0 MiB)", "134217728 bytes (128.0 MiB)")
        found = [("memory", *sizes), ("listen", "127.0.0.1:0", "127.0.0.1:1")]
        service.wait_for(STAYS, 2)
        logged = service.entries(STAYS)
        assert [(each["setting"], each["in_force"], each["wanted"], each["level"]) for each in logged] == [
            (*each, "warning") for each in found
        ]
        told = "the setting {} stays as it was ({}, not {}): to change it, stop the service and start it\n"
        assert (second.returncode, second.stderr) == (0, "".join(told.format(*each) for each in found))
        info = server_info(service)
        assert [(each.name, each.in_force, each.wanted) for each in info.kept_settings] == found
        assert info.memory_bytes == 64 << 20


def test_the_sockets_stay_whatever_the_file_says_by_then(tmp_path: Path) -> None:
    """Also where a process ends by itself: both sockets of a service lie side by side, and workers have their paths."""
    config, path = tmp_path / "kvharbor.toml", tmp_path / "kv.sock"
    config.write_text(f'socket = "{path}"\nsocket_mode = "0640"\n')
    with ServiceProcess(path, environment={"KVHARBOR_CONFIG": str(config)}, names_socket=False) as service:
        service.wait_for("ready")
        config.write_text(f'socket = "{tmp_path / "other.sock"}"\nsocket_mode = "0666"\n')
        assert upgrade(service).returncode == 0
        assert service.restart_child()["socket"] == str(path)
        assert path.stat().st_mode & 0o777 == 0o640
        assert not (tmp_path / "other.sock").exists()


def test_an_upgrade_to_what_cannot_start_changes_nothing(start_fresh: StartService, tmp_path: Path) -> None:
    """The old process goes on, and the log has why."""
    config = tmp_path / "kvharbor.toml"
    config.write_text("grace_s = 4.0\n")
    service = start_fresh(environment={"KVHARBOR_CONFIG": str(config)})
    config.write_text("grace_s = -1\n")
    service.process.send_signal(signal.SIGHUP)
    service.wait_for("upgrade given up: the new process does not start, the old one goes on")
    assert "kvharbor: setting grace_s (file)" in service.log
    assert server_info(service).restart_count == 0


def test_the_command_waits_for_the_new_process(service: ServiceProcess) -> None:
    """`kvharbor upgrade` ends when it serves."""
    command = [sys.executable, "-m", "kvharbor.server.cli", "upgrade", f"--socket={service.socket}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "process 2 of its epoch" in done.stdout
    assert service.wait_for("ready", 2)["restart_count"] == 1


def test_the_command_tells_at_once_why_the_new_process_does_not_start(
    start_fresh: StartService, tmp_path: Path
) -> None:
    """And the next one, of settings that were corrected, does its work."""
    config = tmp_path / "kvharbor.toml"
    config.write_text("grace_s = 4.0\n")
    service = start_fresh(environment={"KVHARBOR_CONFIG": str(config)})
    config.write_text("grace_s = -1\n")
    began_at = time.monotonic()
    failed = upgrade(service)
    assert time.monotonic() - began_at < DEADLINE_S
    told = "kvharbor: the new process does not start, the old one goes on: setting grace_s (file): "
    assert (failed.returncode, failed.stdout, failed.stderr[: len(told)]) == (1, "", told)
    assert failed.stderr.count("\n") == 1
    assert service.wait_for(GIVEN_UP)["cause"].startswith("setting grace_s (file): ")
    config.write_text("grace_s = 3.0\n")
    assert upgrade(service).returncode == 0
    assert service.wait_for("ready", 2)["restart_count"] == 1


def test_a_process_that_dies_without_a_word_is_told_with_its_status(start_fresh: StartService, tmp_path: Path) -> None:
    """As one of a broken installation does; its traceback is in the service's output."""
    code = (
        "import os, sys\nif 'kvharbor.server.child' in sys.orig_argv and os.path.exists({flag!r}):\n    os._exit(7)\n"
    )
    flag = tmp_path / "broken"
    service = start_fresh(environment=start_hooks.environment(tmp_path / "hook", code.format(flag=str(flag))))
    flag.touch()
    failed = upgrade(service)
    assert failed.returncode == 1
    assert "it ended with status 7, see the service's standard error" in failed.stderr
    flag.unlink()


def test_an_upgrade_waits_for_a_recovery(start_fresh: StartService, tmp_path: Path) -> None:
    """What is being taken up is not begun anew: the process gets ready, then it makes room in good order."""
    recovering = Recovering(start_fresh, tmp_path)
    service = recovering.service
    recovering.hold("wait")
    service.kill_child()
    recovering.begun(1)
    service.process.send_signal(signal.SIGHUP)
    service.wait_for("upgrade waits until the process before is ready")
    assert len(service.entries("service process ended")) == 1
    recovering.let_go()
    assert service.wait_for("ready", 3)["restart_count"] == 2
    ends = [(entry["cause"], entry["status"]) for entry in service.entries("service process ended")]
    assert ends == [("killed", -signal.SIGKILL), ("upgraded", 0)]


def test_a_recovery_that_ends_while_an_upgrade_waits_is_followed_by_the_new_process(
    start_fresh: StartService, tmp_path: Path
) -> None:
    """It was started for that, and is not started again."""
    recovering = Recovering(start_fresh, tmp_path)
    service = recovering.service
    recovering.hold("wait")
    service.kill_child()
    first = recovering.begun(1)
    service.process.send_signal(signal.SIGHUP)
    service.wait_for("upgrade waits until the process before is ready")
    recovering.let_go()
    recovering.hold("wait")
    subprocess.run(["kill", "-9", str(first)], check=True)
    second = recovering.begun(2)
    recovering.let_go()
    ready = service.wait_for("ready", 2)
    assert (ready["pid"], ready["restart_count"]) == (second, 2)
    assert [entry["cause"] for entry in service.entries("service process ended")] == ["killed", "killed"]
    assert service.entries(GIVEN_UP) == []


def test_what_hangs_every_recovery_is_dropped(start_fresh: StartService, tmp_path: Path) -> None:
    """As a crash may come of what is kept, so may a hang before readiness: after three the start is cold."""
    recovering = Recovering(start_fresh, tmp_path, watchdog_s="2")
    service = recovering.service
    recovering.hold("hang")
    service.kill_child()
    recovering.begun(3)
    ready = service.wait_for("ready", 2)
    assert (ready["epoch"] != service.wait_for("ready")["epoch"], ready["restart_count"]) == (True, 0)
    assert [entry["cause"] for entry in service.entries("service process ended")] == ["killed", *["hung"] * 3]
    told = "service process broke again and again: what it left is dropped, the next start is cold"
    assert len(service.entries(told)) == 1


def test_a_ledger_of_another_version_is_not_taken_up(start_fresh: StartService) -> None:
    """What it says cannot be told: the start after the upgrade is cold, and nothing is taken for broken."""
    service = start_fresh()
    epoch = service.wait_for("ready")["epoch"]
    with RawCaller(str(service.socket)) as caller:
        caller.open_pool("p")
    ledger, *_ = memfds_of(service.child_pid, "kvharbor-p-ledger")
    with ledger.open("r+b") as header:
        header.write(b"kvharbor ledger 0")
    assert service.restart_child()["epoch"] != epoch
    (lost,) = service.entries("the memory of pools is lost, the next start is cold")
    assert "another version of kvharbor" in lost["cause"]
    assert [entry["cause"] for entry in service.entries("service process ended")] == ["killed", "failed"]
