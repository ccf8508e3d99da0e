"""Under systemd: what it is told, and what it keeps for a supervisor that comes after one that was killed."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvharbor.v1 import cache_service_pb2 as cache
from raw_caller import RawCaller, tokens
from service_process import DEADLINE_S, ServiceProcess

pytestmark = pytest.mark.slow

# As systemd does it: descriptors from 3 on, and variables that name the process itself.
LAUNCH = """
import os, sys
names, fds = sys.argv[1], [int(fd) for fd in sys.argv[2].split(",") if fd]
high = [os.dup2(fd, 200 + place) for place, fd in enumerate(fds)]
for place, fd in enumerate(high):
    os.dup2(fd, 3 + place)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(fds)), LISTEN_FDNAMES=names)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Manager:
    """Stands for systemd: it hears what a service says, and keeps descriptors for it by name."""

    def __init__(self, folder: Path) -> None:
        self.address = folder / "notify"
        self.states: list[str] = []
        self.store: dict[str, int] = {}
        self._started: list[ServiceProcess] = []
        self._arrived = threading.Condition()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.address))
        self._thread = threading.Thread(target=self._hear)
        self._thread.start()

    def start(self, path: Path, **environment: str) -> ServiceProcess:
        """Starts a service with what is kept for it."""
        names, fds = ":".join(self.store), [*self.store.values()]
        launcher = [sys.executable, "-c", LAUNCH, names, ",".join(map(str, fds))]
        variables = {"NOTIFY_SOCKET": str(self.address), "FDSTORE": "4096", **environment}
        self._started.append(
            ServiceProcess(path, "--memory=8MiB", environment=variables, launcher=launcher, pass_fds=fds)
        )
        return self._started[-1]

    def wait_for(self, state: str) -> None:
        """Waits until the service has said so."""
        with self._arrived:
            assert self._arrived.wait_for(lambda: state in self.states, DEADLINE_S), f"no {state} in {self.states}"

    def close(self) -> None:
        """Ends it and what it has started, and closes what it keeps."""
        for service in self._started:
            if service.process.returncode is None:
                service.kill()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"", str(self.address))
        self._thread.join()
        self._socket.close()
        for fd in self.store.values():
            os.close(fd)

    def _hear(self) -> None:
        while True:
            data, fds, _, _ = socket.recv_fds(self._socket, 4096, maxfds=64)
            if not data:
                return
            lines = dict(line.partition("=")[::2] for line in data.decode().splitlines())
            with self._arrived:
                name = lines.get("FDNAME", "")
                if "FDSTORE" in lines:
                    assert lines["FDPOLL"] == "0"
                    (self.store[name],) = fds
                elif "FDSTOREREMOVE" in lines and name in self.store:
                    os.close(self.store.pop(name))
                self.states += data.decode().splitlines()
                self._arrived.notify_all()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    """A fresh one."""
    made = Manager(tmp_path)
    yield made
    made.close()


def test_it_is_told_of_readiness_reloads_and_the_end(manager: Manager, tmp_path: Path) -> None:
    """Type=notify-reload: SIGHUP is announced with a time, then readiness; an end in order leaves nothing kept."""
    service = manager.start(tmp_path / "a.sock")
    service.wait_for("ready")
    manager.wait_for("READY=1")
    manager.states.clear()
    service.process.send_signal(signal.SIGHUP)
    service.wait_for("ready", 2)
    manager.wait_for("READY=1")
    assert "RELOADING=1" in manager.states
    assert [line for line in manager.states if line.startswith("MONOTONIC_USEC=")] != []
    assert "epoch#meta" in manager.store
    assert service.stop() == 0
    manager.wait_for("STOPPING=1")
    manager.wait_for("FDNAME=epoch#meta")
    assert [name for name in manager.store if name != "control"] == []


def test_the_watchdog_hears_of_the_child_and_not_of_the_supervisor(manager: Manager, tmp_path: Path) -> None:
    """A child whose event loop does not turn is not said to live, however well the supervisor is."""
    service = manager.start(tmp_path / "a.sock", WATCHDOG_USEC="20000000")
    service.wait_for("ready")
    manager.wait_for("WATCHDOG=1")
    os.kill(service.child_pid, signal.SIGSTOP)
    manager.states.clear()
    service.process.send_signal(signal.SIGTERM)
    assert service.wait() == 0
    # Up to a heartbeat that was under way; two a second would have come.
    assert manager.states.count("WATCHDOG=1") <= 1


def test_a_killed_supervisor_loses_nothing_that_systemd_has_kept(manager: Manager, tmp_path: Path) -> None:
    """The next one takes it up: the same epoch, pools and committed blocks, and counts itself."""
    path = tmp_path / "a.sock"
    killed = manager.start(path)
    epoch = killed.wait_for("ready")["epoch"]
    with RawCaller(str(path)) as caller:
        pool_id = caller.open_pool("p")
        request = cache.AllocateRequest(pool_id=pool_id, token_ids=tokens(*range(32)))
        sequence = caller.call(caller.cache.Allocate, request).sequence
        item = cache.CommitItem(sequence_id=sequence.sequence_id, computed_tokens=32)
        caller.call(caller.cache.Commit, cache.CommitRequest(pool_id=pool_id, items=[item]))
    killed.wait_for("session ended")
    killed.kill()
    assert {"epoch#meta", "pool/1#0", "pool/1#meta", "pool/1/part/0#0", "pool/1/part/0#meta", "control"} <= set(
        manager.store
    )
    service = manager.start(path)
    ready = service.wait_for("ready")
    assert (ready["epoch"], ready["restart_count"]) == (epoch, 1)
    with RawCaller(str(path)) as caller:
        caller.open_pool("p")
        found = caller.call(caller.cache.Lookup, cache.LookupRequest(pool_id=pool_id, token_ids=tokens(*range(32))))
        assert found.present_tokens == 32
    assert service.stop() == 0


def test_a_store_that_cannot_have_everything_is_given_up(manager: Manager, tmp_path: Path) -> None:
    """A part of what is kept would be taken for the whole: the service goes on, and the next start is cold."""
    path = tmp_path / "a.sock"
    killed = manager.start(path, FDSTORE="4")
    epoch = killed.wait_for("ready")["epoch"]
    with RawCaller(str(path)) as caller:
        caller.open_pool("p")
    told = killed.wait_for(
        "systemd's descriptor store is full and given up: if the supervisor is killed, the next start is cold"
    )
    assert (told["level"], told["limit"]) == ("error", 4)
    assert "FileDescriptorStoreMax=" in told["remedy"]
    assert killed.restart_child()["epoch"] == epoch
    killed.kill()
    assert [name for name in manager.store if name.endswith("#meta")] == []
    assert manager.start(path).wait_for("ready")["epoch"] != epoch


def test_what_is_torn_in_the_store_is_not_taken_up(manager: Manager, tmp_path: Path) -> None:
    """A record that does not fit its sum: without the epoch there is nothing to go on with."""
    path = tmp_path / "a.sock"
    killed = manager.start(path)
    epoch = killed.wait_for("ready")["epoch"]
    killed.kill()
    os.pwrite(manager.store["epoch#meta"], b"x", 20)
    service = manager.start(path)
    assert service.wait_for("what systemd has kept is not whole and is dropped")["name"] == "epoch#meta"
    assert service.wait_for("ready")["epoch"] != epoch
    assert service.stop() == 0
