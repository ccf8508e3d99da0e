"""A side socket that cannot be connected to, or not yet."""

import errno
import os
import socket
from pathlib import Path

import pytest

from kvharbor.client import DeadlineExceeded, ServiceUnreachable, connect
from side_frames import open_side


def test_a_full_backlog_is_waited_for(tmp_path: Path) -> None:
    """Many workers that start together are no failure; the deadline ends the wait."""
    path = str(tmp_path / "s.side")
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(path)
        listener.listen(0)
        first.connect(path)
        with pytest.raises(DeadlineExceeded, match=r"took no connection in 0\.05 s"):
            open_side(path, timeout_s=0.05)


def test_a_socket_of_others_is_told_from_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service runs: to start another one would not help. Tests may run as root, whom no mode keeps out."""

    def refuse(connection: socket.socket, path: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(socket.socket, "connect", refuse)
    path = str(tmp_path / "s.side")
    with pytest.raises(ServiceUnreachable, match=f"may not connect to {path}: .*socket_mode and socket_group"):
        open_side(path)


@pytest.mark.parametrize("kind", ["missing", "file", "dead"])
def test_nobody_at_the_path_is_said_with_the_remedy(tmp_path: Path, kind: str) -> None:
    """A path that is missing, no socket, or a socket that nobody listens on any more."""
    path = tmp_path / "s.side"
    if kind == "file":
        path.write_text("")
    if kind == "dead":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    with pytest.raises(ServiceUnreachable, match="kvharbor serve") as error:
        open_side(str(path))
    assert error.value.metadata["address"] == str(path)


def test_a_socket_without_its_side_socket_is_told_from_none(tmp_path: Path) -> None:
    """As where a container was given the one file: the service runs, and to start another would not help."""
    service = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(service))
        with pytest.raises(ServiceUnreachable, match=r"s\.side beside it is not there, and both are needed"):
            connect(service)
