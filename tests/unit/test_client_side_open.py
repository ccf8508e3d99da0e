"""Opening a session while the service's process is replaced: the next one is asked, as long as there is time."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvharbor.client import DeadlineExceeded, SessionLost
from kvharbor.client.options import Options
from kvharbor.client.side import SideSocket
from kvharbor.v1 import errors_pb2, side_pb2
from side_frames import frame, read_request

WELCOME = side_pb2.SideResponse(welcome=side_pb2.Welcome(session_id="s1", session_token="secret", epoch="e1"))
UNKNOWN = side_pb2.SideResponse(refused=side_pb2.Refused(reason=errors_pb2.ERROR_REASON_SESSION_UNKNOWN, message="no"))
Serve = Callable[[socket.socket], None]


class Listener:
    """A side socket whose connections are served by `processes`, one after the other, the last one for ever."""

    def __init__(self, path: Path, processes: list[Serve]) -> None:
        self.path = str(path)
        self.hello_count = 0
        self._processes = processes
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        """Ends it."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._listener.close()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                with connection, contextlib.suppress(ConnectionError):
                    read_request(connection)
                    self.hello_count += 1
                    serve = self._processes.pop(0) if len(self._processes) > 1 else self._processes[0]
                    serve(connection)


def answering(response: side_pb2.SideResponse) -> Serve:
    """Returns a process that answers, and stays until the client has gone."""

    def serve(connection: socket.socket) -> None:
        connection.sendall(frame(response))
        connection.recv(1)

    return serve


def dying(connection: socket.socket) -> None:
    """A process that ends between Hello and Welcome."""


def silent(connection: socket.socket) -> None:
    """A process that says nothing until the client has gone."""
    connection.recv(1)


@pytest.fixture
def listen(tmp_path: Path) -> Iterator[Callable[..., Listener]]:
    """Starts a listener."""
    started: list[Listener] = []

    def start(*processes: Serve) -> Listener:
        started.append(Listener(tmp_path / "s.side", [*processes]))
        return started[-1]

    yield start
    for each in started:
        each.close()


def opened(listener: Listener, timeout_s: float) -> str:
    """Opens a session and closes it again; returns its id."""
    side, session = SideSocket.open(listener.path, Options().hello(), timeout_s=timeout_s)
    with contextlib.closing(side):
        assert side._connection.gettimeout() == timeout_s
    return session.session_id


def test_a_process_that_ends_before_its_welcome_is_followed_by_the_next(listen: Callable[..., Listener]) -> None:
    """However many of them do, and what the session is given later has its whole time."""
    listener = listen(dying, dying, answering(WELCOME))
    assert opened(listener, 10.0) == "s1"
    assert listener.hello_count == 3


def test_a_refusal_is_final(listen: Callable[..., Listener]) -> None:
    """The reason of a session that is gone has the same class as one that was lost: this service will not have it."""
    listener = listen(answering(UNKNOWN))
    with pytest.raises(SessionLost, match="no"):
        opened(listener, 10.0)
    assert listener.hello_count == 1


def test_tries_have_pauses_and_an_end(listen: Callable[..., Listener]) -> None:
    """A service that has no room for more sessions closes each connection: it must not be asked all the time."""
    listener = listen(dying)
    began_at = time.monotonic()
    with pytest.raises(SessionLost, match="closed by the service"):
        opened(listener, 0.5)
    assert time.monotonic() - began_at < 5.0
    assert 2 <= listener.hello_count <= 5


def test_all_tries_together_have_the_time_of_one(listen: Callable[..., Listener]) -> None:
    """The next process has what is left."""
    listener = listen(dying, silent)
    began_at = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        opened(listener, 0.5)
    assert 0.3 < time.monotonic() - began_at < 5.0
    assert listener.hello_count == 2
