"""Who owns a socket path, in one process: claims, stale files, and what is left alone."""

import fcntl
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvharbor.server.errors import StartupError
from kvharbor.server.supervision.paths import (
    MAX_PATH_BYTES,
    PATIENCE_S,
    SocketAccess,
    bind_published,
    claimed,
    socket_paths,
)
from waiting import quickest, seconds

pytestmark = pytest.mark.usefixtures("no_leaks")


def listening(path: str) -> socket.socket:
    """Returns a socket that listens at `path`."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(1)
    return listener


def test_the_side_socket_lies_beside_and_the_rest_keeps_the_whole_name(tmp_path: Path) -> None:
    """The path rule of side.proto; a lock called x.lock might be somebody else's."""
    paths = socket_paths(str(tmp_path / "x.sock"))
    assert [path.name for path in (paths.grpc, paths.side, paths.lock, paths.port)] == [
        "x.sock",
        "x.side",
        "x.sock.lock",
        "x.sock.port",
    ]
    assert socket_paths(str(tmp_path / "y")).side.name == "y.side"


def test_a_relative_path_counts_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And "unix:" before it is what clients write."""
    monkeypatch.chdir(tmp_path)
    assert socket_paths("a.sock").grpc == tmp_path / "a.sock"
    assert socket_paths("unix:a.sock").grpc == tmp_path / "a.sock"


def test_a_path_is_counted_in_bytes(tmp_path: Path) -> None:
    """107 bytes are possible, a 108th is named with the limit."""
    room = MAX_PATH_BYTES - len(os.fsencode(tmp_path)) - len("/.sock")
    fitting = str(tmp_path / f"{'x' * room}.sock")
    assert str(socket_paths(fitting).grpc) == fitting
    with pytest.raises(StartupError, match="has 108 bytes, at most 107"):
        socket_paths(str(tmp_path / f"{'x' * (room - 1)}é.sock"))


def test_a_claim_leaves_nothing_behind(tmp_path: Path) -> None:
    """Sockets, lock and port file go with it."""
    paths = socket_paths(str(tmp_path / "a.sock"))
    with claimed(paths):
        assert paths.lock.exists()
        listener = bind_published(paths.grpc, SocketAccess(0o600, None), listening)
        paths.port.write_text("1\n")
    listener.close()
    assert list(tmp_path.iterdir()) == []


def test_a_second_claim_is_refused_and_disturbs_nothing(tmp_path: Path) -> None:
    """The path is named, and the first owner's files are as they were."""
    paths = socket_paths(str(tmp_path / "a.sock"))
    with claimed(paths), bind_published(paths.grpc, SocketAccess(0o600, None), listening):
        before = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
        # Within one process only the lock that children share tells the two apart.
        refusal = pytest.raises(StartupError, match=f"another kvharbor serves {paths.grpc}")
        with refusal, claimed(paths, patience_s=0.0):
            pass
        assert {path.name: path.stat().st_ino for path in tmp_path.iterdir()} == before


HOLD = """
import sys
from pathlib import Path
from kvharbor.server.supervision.paths import claimed, socket_paths
with claimed(socket_paths(sys.argv[1])):
    print("claimed", flush=True)
    sys.stdin.read()
"""


def test_a_living_owner_is_not_waited_for(tmp_path: Path) -> None:
    """S5: whether it lives, the record lock of its process tells at once."""
    paths = socket_paths(str(tmp_path / "a.sock"))
    command = [sys.executable, "-c", HOLD, str(paths.grpc)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"claimed\n"

        def claim() -> None:
            with pytest.raises(StartupError, match=f"another kvharbor serves {paths.grpc}"), claimed(paths):
                pass

        assert quickest(lambda: seconds(claim), PATIENCE_S / 2) < PATIENCE_S / 2


def test_children_of_a_dead_owner_are_waited_for(tmp_path: Path) -> None:
    """S5: whoever still has its lock descriptor owns the path as well, for as long as it lives."""
    paths = socket_paths(str(tmp_path / "a.sock"))
    lock = os.open(paths.lock, os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    released_at: list[float] = []

    def end() -> None:
        released_at.append(time.monotonic())
        os.close(lock)

    with pytest.raises(StartupError, match="or what is left of one that was killed"), claimed(paths, patience_s=0.05):
        pass
    threading.Timer(0.1, end).start()
    with claimed(paths):
        assert time.monotonic() >= released_at[0]


def test_sockets_of_a_dead_owner_are_replaced(tmp_path: Path) -> None:
    """A lock file that nobody holds and a socket that nobody listens at are what kill -9 leaves."""
    paths = socket_paths(str(tmp_path / "a.sock"))
    listening(str(paths.grpc)).close()
    paths.lock.touch()
    with claimed(paths):
        assert not paths.grpc.exists()


def test_a_socket_of_a_program_without_our_lock_is_not_taken(tmp_path: Path) -> None:
    """It goes on listening, and its path stays."""
    paths = socket_paths(str(tmp_path / "a.sock"))
    with listening(str(paths.grpc)):
        with pytest.raises(StartupError, match="another program listens at"), claimed(paths):
            pass
        assert [path.name for path in tmp_path.iterdir()] == ["a.sock"]


@pytest.mark.parametrize("name", ["a.sock", "a.side"])
def test_what_is_no_socket_is_left_intact(tmp_path: Path, name: str) -> None:
    """A regular file where a socket would be is refused, its content untouched, and no lock remains."""
    (tmp_path / name).write_text("precious")
    with pytest.raises(StartupError, match="is no socket"), claimed(socket_paths(str(tmp_path / "a.sock"))):
        pass
    assert (tmp_path / name).read_text() == "precious"
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_directory_that_does_not_exist_is_named(tmp_path: Path) -> None:
    """The remedy is to create it."""
    paths = socket_paths(str(tmp_path / "none" / "a.sock"))
    with pytest.raises(StartupError, match=f"{tmp_path}/none of the socket does not exist"), claimed(paths):
        pass


def test_a_file_in_place_of_the_directory_is_named(tmp_path: Path) -> None:
    """It is no directory."""
    (tmp_path / "file").touch()
    paths = socket_paths(str(tmp_path / "file" / "a.sock"))
    with pytest.raises(StartupError, match="is no directory"), claimed(paths):
        pass


def test_a_lock_that_was_unlinked_meanwhile_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who locks the file of an owner that has just left, locks a file that nobody else will ever see."""
    paths = socket_paths(str(tmp_path / "a.sock"))
    real_open = os.open
    opened: list[int] = []

    def open_and_lose(path: Path, *arguments: int) -> int:
        descriptor = real_open(path, *arguments)
        if path == paths.lock and not opened:
            opened.append(descriptor)
            paths.lock.unlink()
        return descriptor

    monkeypatch.setattr(os, "open", open_and_lose)
    with claimed(paths):
        assert paths.lock.exists()


def test_a_socket_appears_with_its_mode_and_without_its_private_name(tmp_path: Path) -> None:
    """The umask does not matter, and there is no moment at which others could connect."""
    path = tmp_path / "a.sock"
    previous = os.umask(0)
    try:
        with bind_published(path, SocketAccess(0o620, None), listening):
            assert stat.S_IMODE(path.stat().st_mode) == 0o620
            assert [each.name for each in tmp_path.iterdir()] == ["a.sock"]
        assert os.umask(0) == 0
    finally:
        os.umask(previous)
