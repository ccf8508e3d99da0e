"""The proof of who connects: with the kernel's own word, without it, and where there is none."""

import contextlib
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvharbor.server.session_errors import PeerUnproven
from kvharbor.server.sessions import peer
from kvharbor.server.sessions.peer import boot_time, credentials, has_exited, is_same_process, pidfd_of

CONNECT = """
import socket, sys, os
side = socket.socket(socket.AF_UNIX)
side.connect(sys.argv[1])
if sys.argv[2] == "leave-to-child" and os.fork():
    os._exit(0)
sys.stdin.read()
"""
UNKNOWN_OPTION = 9999


@contextlib.contextmanager
def connected(folder: Path, how: str = "stay") -> Iterator[tuple[subprocess.Popen[bytes], socket.socket, float]]:
    """A process that connects, its accepted socket, and when that was. With "leave-to-child" it exits at once."""
    path = folder / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        process = subprocess.Popen([sys.executable, "-c", CONNECT, path, how], stdin=subprocess.PIPE)
        connection, _ = listener.accept()
        accepted_at = boot_time()
    path.unlink()
    with process, connection:
        yield process, connection, accepted_at
        process.kill()


@pytest.fixture(params=["kernel", "start time"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to the proof: a kernel that does not know the option refuses it, as this one does an unknown one."""
    if request.param == "start time":
        monkeypatch.setattr(peer, "SO_PEERPIDFD", UNKNOWN_OPTION)
    return str(request.param)


@pytest.mark.usefixtures("way")
def test_a_pidfd_is_that_of_the_process_that_connected(tmp_path: Path) -> None:
    """It tells of its exit, and of nobody else's."""
    with connected(tmp_path) as (process, connection, accepted_at):
        pidfd = pidfd_of(connection, accepted_at=accepted_at)
        assert credentials(connection) == (process.pid, os.getuid())
        assert not has_exited(pidfd)
        assert not os.get_inheritable(pidfd)
        process.kill()
        assert select.select([pidfd], [], [], 10) == ([pidfd], [], [])
        assert has_exited(pidfd)
        os.close(pidfd)


def test_without_the_option_a_process_younger_than_its_connection_is_no_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number had been another's: that one connected, and is gone."""
    monkeypatch.setattr(peer, "SO_PEERPIDFD", UNKNOWN_OPTION)
    before = boot_time()
    with connected(tmp_path) as (process, connection, _), pytest.raises(PeerUnproven) as refused:
        pidfd_of(connection, accepted_at=before - 1)
    assert refused.value.pid == process.pid


def test_without_the_option_a_process_that_is_gone_is_no_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child of it holds the socket: nobody could tell when what it shares is free."""
    monkeypatch.setattr(peer, "SO_PEERPIDFD", UNKNOWN_OPTION)
    with connected(tmp_path, "leave-to-child") as (process, connection, accepted_at):
        process.wait(10)
        with pytest.raises(PeerUnproven, match="Linux 6"):
            pidfd_of(connection, accepted_at=accepted_at)


def test_a_process_of_no_number_here_is_no_proof_without_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another PID namespace's: the refusal says what would help."""
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(peer, "SO_PEERPIDFD", UNKNOWN_OPTION)
    monkeypatch.setattr(peer, "credentials", lambda _: (0, 0))
    with ours, theirs, pytest.raises(PeerUnproven, match="PID namespace") as refused:
        pidfd_of(ours, accepted_at=boot_time())
    assert refused.value.metadata()["pid"] == "0"


def test_the_same_process_is_recognised_by_number_and_without(tmp_path: Path) -> None:
    """Over two connections; a fork of it is another one, and so is any process once the known one is gone."""
    with connected(tmp_path) as (process, connection, accepted_at):
        known = pidfd_of(connection, accepted_at=accepted_at)
        again, own = os.pidfd_open(process.pid), os.pidfd_open(os.getpid())
        assert is_same_process((known, process.pid), (again, process.pid))
        assert is_same_process((known, 0), (again, 0))
        assert not is_same_process((known, process.pid), (own, os.getpid()))
        with connected(tmp_path) as (other, other_connection, other_accepted_at):
            stranger = pidfd_of(other_connection, accepted_at=other_accepted_at)
            assert not is_same_process((known, 0), (stranger, 0))
            assert not is_same_process((known, process.pid), (stranger, other.pid))
            os.close(stranger)
        process.kill()
        process.wait(10)
        assert not is_same_process((known, process.pid), (again, process.pid))
        assert not is_same_process((known, 0), (again, 0))
        for pidfd in (known, again, own):
            os.close(pidfd)


ELSEWHERE = """
import os, socket, sys
from kvharbor.server.sessions import peer
from kvharbor.server.session_errors import PeerUnproven

with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(sys.argv[1])
    listener.listen()
    print("listening", flush=True)
    one, two = (listener.accept()[0] for _ in range(2))
own = os.pidfd_open(os.getpid())
first, second = (peer.pidfd_of(each, accepted_at=peer.boot_time()) for each in (one, two))
print(peer.credentials(one)[0], peer.has_exited(first))
print(peer.is_same_process((first, 0), (second, 0)), peer.is_same_process((first, 0), (own, os.getpid())))
peer.SO_PEERPIDFD = int(sys.argv[2])
try:
    peer.pidfd_of(one, accepted_at=peer.boot_time())
except PeerUnproven as unproven:
    print(unproven.metadata()["pid"])
"""


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a PID namespace of its own")
def test_a_process_outside_the_pid_namespace_is_proved_by_the_kernel_alone(tmp_path: Path) -> None:
    """As between two containers: it has no number there, and is recognised by its pidfd."""
    if subprocess.run(["unshare", "--pid", "--fork", "true"], check=False, capture_output=True).returncode:
        pytest.skip("no PID namespace can be made here: unshare --pid fails")
    path = str(tmp_path / "s")
    command = ["unshare", "--pid", "--fork", sys.executable, "-c", ELSEWHERE, path, str(UNKNOWN_OPTION)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as elsewhere:
        assert elsewhere.stdout is not None
        assert elsewhere.stdout.readline() == "listening\n"
        with socket.socket(socket.AF_UNIX) as one, socket.socket(socket.AF_UNIX) as two:
            one.connect(path)
            two.connect(path)
            assert elsewhere.stdout.read().splitlines() == ["0 False", "True False", "0"]
