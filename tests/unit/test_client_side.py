"""The side socket against a peer that misbehaves; the real service is in the integration tests."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvharbor.client import DeadlineExceeded, HarborError, ServiceBug, SessionLost, SessionRequired
from kvharbor.client.options import Options
from kvharbor.client.side import SideSocket
from kvharbor.v1 import errors_pb2, side_pb2, types_pb2
from side_frames import WELCOME, frame, notice, open_side, read_request
from waiting import until

Peer = Callable[[Callable[[socket.socket], None]], str]


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    """Starts a listener whose one connection is served by a function; joins it at the end."""
    threads: list[threading.Thread] = []
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    path = str(tmp_path / "s.side")
    listener.bind(path)
    listener.listen()

    def start(serve: Callable[[socket.socket], None]) -> str:
        def run() -> None:
            connection, _ = listener.accept()
            # A client that closes with something unread resets the connection.
            with connection, contextlib.suppress(ConnectionResetError):
                serve(connection)

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        return path

    yield start
    for thread in threads:
        thread.join(10)
    listener.close()


def test_the_hello_says_who_the_client_is(peer: Peer) -> None:
    """Name, library with version, and the API version; the welcome becomes the session."""
    requests: list[side_pb2.SideRequest] = []

    def serve(connection: socket.socket) -> None:
        requests.append(read_request(connection))
        connection.sendall(frame(WELCOME))
        connection.recv(1)

    side, session = SideSocket.open(peer(serve), Options(client_name="w").hello(), timeout_s=5.0)
    assert (session.session_id, session.token, session.epoch, session.tenant) == ("s1", "secret", "e1", "uid-1")
    assert (requests[0].hello.client_name, list(requests[0].hello.api_versions)) == ("w", ["v1"])
    assert requests[0].hello.client_version.startswith("kvharbor-python")
    assert not side.lost
    side.close()


def test_a_frame_may_arrive_byte_by_byte_and_with_its_descriptor(peer: Peer) -> None:
    """A stream has no borders; the descriptor comes with the first byte and is not inherited by a child."""
    attached = side_pb2.SideResponse(attached=side_pb2.Attached(pool=types_pb2.PoolDescriptor(pool_id="p")))
    read_end, write_end = os.pipe()

    def serve(connection: socket.socket) -> None:
        read_request(connection)
        for byte in frame(WELCOME):
            connection.sendall(bytes([byte]))
        read_request(connection)
        data = frame(attached)
        socket.send_fds(connection, [data[:1]], [write_end])
        for byte in data[1:]:
            connection.sendall(bytes([byte]))

    side = open_side(peer(serve))
    answer, (fd,) = side.attach(side_pb2.Attach(pool_id="p"))
    os.write(fd, b"x")
    assert (answer.pool.pool_id, os.read(read_end, 1), os.get_inheritable(fd)) == ("p", b"x", False)
    for each in (fd, read_end, write_end):
        os.close(each)
    side.close()


def test_notices_between_answers_are_kept_for_those_who_ask(peer: Peer) -> None:
    """They come before, beside and after the answer; the descriptor still belongs to the answer."""
    attached = side_pb2.SideResponse(attached=side_pb2.Attached(pool=types_pb2.PoolDescriptor(pool_id="p")))
    read_end, write_end = os.pipe()
    hellos: list[side_pb2.SideRequest] = []

    def serve(connection: socket.socket) -> None:
        hellos.append(read_request(connection))
        connection.sendall(frame(WELCOME))
        read_request(connection)
        connection.sendall(notice("a") + notice("b") + notice("a"))
        socket.send_fds(connection, [frame(attached)], [write_end])
        connection.sendall(notice("c"))
        connection.recv(1)

    side, _ = SideSocket.open(peer(serve), Options(accepts_warm_tasks=True).hello(), timeout_s=5.0)
    assert hellos[0].hello.accepts_warm_tasks
    answer, (fd,) = side.attach(side_pb2.Attach(pool_id="p"))
    assert answer.pool.pool_id == "p"
    os.write(fd, b"x")
    found: list[str] = []
    while len(found) < 3:
        side.wait_for_notice(5.0)
        found += side.take_notices()
    assert found == ["a", "b", "c"]
    assert side.take_notices() == []
    for each in (fd, read_end, write_end):
        os.close(each)
    side.close()


def test_waiting_for_a_notice_ends_with_its_time(peer: Peer) -> None:
    """Or with the session, which the next question then tells."""
    end = threading.Event()

    def serve(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(frame(WELCOME))
        end.wait(10)

    side = open_side(peer(serve))
    side.wait_for_notice(0.01)
    assert side.take_notices() == []
    end.set()
    side.wait_for_notice(10.0)
    with pytest.raises(SessionLost):
        side.take_notices()
    side.close()
    side.wait_for_notice(10.0)
    with pytest.raises(SessionLost, match="closed here"):
        side.take_notices()


def test_an_answer_that_nothing_asked_for_is_a_bug_of_the_service(peer: Peer) -> None:
    """It would be taken for that of the next request; a descriptor with it is closed."""
    attached = side_pb2.SideResponse(attached=side_pb2.Attached())
    read_end, write_end = os.pipe()

    def serve(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(frame(WELCOME))
        socket.send_fds(connection, [frame(attached)], [write_end])
        os.close(write_end)
        connection.recv(1)

    side = open_side(peer(serve))
    side.wait_for_notice(5.0)
    with pytest.raises(ServiceBug, match="nothing had asked"):
        side.take_notices()
    side.close()
    assert os.read(read_end, 1) == b""
    os.close(read_end)


def test_the_end_is_seen_behind_notices_that_nobody_has_read(peer: Peer) -> None:
    """`lost` looks at the connection, not at what is in it."""

    def serve(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(frame(WELCOME) + notice("a"))

    side = open_side(peer(serve))
    side.wait_for_notice(5.0)
    until(lambda: side.lost)
    with pytest.raises(SessionLost):
        side.take_notices()
    side.close()


def test_a_refused_hello_is_the_error_of_its_reason(peer: Peer) -> None:
    """Refused carries reason, message and metadata."""
    refused = side_pb2.SideResponse(
        refused=side_pb2.Refused(reason=errors_pb2.ERROR_REASON_SESSION_REQUIRED, message="no", metadata={"a": "b"})
    )
    with pytest.raises(SessionRequired, match="no") as error:
        open_side(peer(lambda connection: connection.sendall(frame(refused))))
    assert error.value.metadata == {"a": "b"}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"", SessionLost),
        (b"\x01\x00", SessionLost),
        (b"\x10\x00\x00\x00half", SessionLost),
        (b"\xff\xff\xff\xff", ServiceBug),
        (b"\x02\x00\x00\x00\xff\xff", ServiceBug),
        (frame(side_pb2.SideResponse()), ServiceBug),
        (frame(side_pb2.SideResponse(attached=side_pb2.Attached())), ServiceBug),
    ],
)
def test_a_peer_that_breaks_the_protocol_is_a_typed_error(
    peer: Peer, answer: bytes, expected: type[HarborError]
) -> None:
    """Cut off at any place, oversized, garbage, empty, or the answer to something else."""

    def serve(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(answer)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)

    with contextlib.closing(SideSocket.connect(peer(serve), timeout_s=5.0)) as side, pytest.raises(expected):
        side.hello(Options().hello())


def test_a_silent_peer_is_given_up_at_the_deadline(peer: Peer) -> None:
    """A late answer would be taken for the next one, so the session is closed."""

    def serve(connection: socket.socket) -> None:
        while connection.recv(4096):
            pass

    with pytest.raises(DeadlineExceeded, match=r"0\.05 s"):
        open_side(peer(serve), timeout_s=0.05)


def test_the_end_of_the_service_is_seen_on_the_socket(peer: Peer) -> None:
    """`lost` needs no call to the service."""
    end = threading.Event()

    def serve(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(frame(WELCOME))
        end.wait(10)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)

    side = open_side(peer(serve))
    assert not side.lost
    end.set()
    with pytest.raises(SessionLost):
        side.attach(side_pb2.Attach(pool_id="p"))
    assert side.lost
    side.close()
    assert side.lost


def test_waiting_for_the_end_ends_with_it(peer: Peer) -> None:
    """Whoever ends it, and although a notice is there that nobody reads."""
    end = threading.Event()

    def serve(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(frame(WELCOME) + notice("a"))
        end.wait(10)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)

    side = open_side(peer(serve))
    waiting = threading.Thread(target=side.wait_for_end)
    waiting.start()
    assert waiting.is_alive()
    end.set()
    waiting.join(10)
    assert not waiting.is_alive()
    side.end()
    side.wait_for_end()
    side.close()
    side.wait_for_end()


def test_a_patient_hello_waits_longer_than_its_time(peer: Peer) -> None:
    """The process that is to answer is not there yet; the end of the socket ends the wait."""
    welcomed = threading.Event()

    def serve(connection: socket.socket) -> None:
        read_request(connection)
        welcomed.wait(10)
        connection.sendall(frame(WELCOME))
        read_request(connection)

    side = SideSocket.connect(peer(serve), timeout_s=0.05)
    threading.Timer(0.1, welcomed.set).start()
    assert side.hello(Options().hello(), patient=True).session_id == "s1"
    with pytest.raises(SessionLost):
        side.hello(Options().hello(), patient=True)
    side.close()
