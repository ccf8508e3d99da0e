"""I3: who owns a socket path, after a crash and beside another."""

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import StartService
from kvharbor.v1 import pool_service_pb2 as pools
from raw_caller import RawCaller
from service_process import ServiceProcess
from waiting import quickest, seconds

pytestmark = pytest.mark.slow
MOST_START_S = 2.0


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose path leaves room to choose a socket's length."""
    with tempfile.TemporaryDirectory(prefix="kv", dir="/tmp") as folder:
        yield Path(folder)


def epoch_at(path: Path | str) -> str:
    """Returns the epoch of the service that answers at a path."""
    with RawCaller(str(path)) as caller:
        return str(caller.pools.GetServerInfo(pools.GetServerInfoRequest(), timeout=5).epoch)


def refused_at(path: Path | str) -> str:
    """Starts a service that cannot have its path; returns its one line."""
    lines: list[str] = []

    def start() -> None:
        service = ServiceProcess(path, "--memory=1MiB")
        assert service.wait() == 2
        lines[:] = service.lines

    assert quickest(lambda: seconds(start), MOST_START_S) < MOST_START_S
    (line,) = lines
    return line


def test_after_kill_9_the_path_is_taken_over(start_fresh: StartService, tmp_path: Path) -> None:
    """I3 (a): the files of a dead service are no obstacle."""
    path = tmp_path / "a.sock"
    killed = start_fresh(socket=path)
    killed.kill()
    assert path.exists()
    restarted = start_fresh(socket=path)
    assert epoch_at(path) == restarted.wait_for("ready")["epoch"]


def test_a_second_start_is_refused_and_the_first_stays_reachable(start_fresh: StartService, tmp_path: Path) -> None:
    """I3 (b): also after the second has ended."""
    path = tmp_path / "a.sock"
    first = start_fresh(socket=path)
    assert f"another kvharbor serves {path}" in refused_at(path)
    assert epoch_at(path) == first.wait_for("ready")["epoch"]


def test_a_regular_file_stays_as_it_is(tmp_path: Path) -> None:
    """I3 (c): it is refused, its content intact."""
    path = tmp_path / "a.sock"
    path.write_text("precious")
    assert f"{path} exists and is no socket" in refused_at(path)
    assert path.read_text() == "precious"
    assert list(tmp_path.iterdir()) == [path]


def test_107_bytes_work_and_108_are_refused(start_fresh: StartService, short_folder: Path) -> None:
    """I3 (d): the error names the limit."""
    room = 107 - len(os.fsencode(short_folder)) - len("/.sock")
    longest = short_folder / f"{'x' * room}.sock"
    assert len(os.fsencode(longest)) == 107
    service = start_fresh(socket=longest)
    assert epoch_at(longest) == service.wait_for("ready")["epoch"]
    assert "has 108 bytes, at most 107" in refused_at(short_folder / f"{'x' * (room + 1)}.sock")


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    """I3 (e): with the remedy."""
    line = refused_at(tmp_path / "none" / "a.sock")
    assert f"the directory {tmp_path}/none of the socket does not exist: create it" in line


def test_a_directory_that_cannot_be_written_is_named() -> None:
    """I3 (f): /sys takes no files, not even from root."""
    assert "cannot create /sys/a.sock.lock beside the socket" in refused_at("/sys/a.sock")


def test_a_relative_path_works_from_any_directory(short_folder: Path) -> None:
    """I3 (g): it counts from the working directory, and the log has the whole path."""
    service = ServiceProcess("a.sock", "--memory=1MiB", working_directory=short_folder)
    assert service.wait_for("ready")["socket"] == str(short_folder / "a.sock")
    assert epoch_at(short_folder / "a.sock") == service.wait_for("ready")["epoch"]
    assert service.stop() == 0
    assert list(short_folder.iterdir()) == []


def test_a_live_socket_of_another_program_is_left_alone(tmp_path: Path) -> None:
    """I3: it has no lock of ours, and still it is not ours to take."""
    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(path))
        other.listen(1)
        assert f"another program listens at {path}" in refused_at(path)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(str(path))
