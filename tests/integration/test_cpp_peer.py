"""The C++ client against a side socket that misbehaves, with no service behind it."""

import contextlib
import fcntl
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cpp_worker import WORKER, CppError, CppWorker, require_build
from kvharbor.v1 import side_pb2, types_pb2
from side_frames import frame

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SIZE_BYTES = 2**16
WELCOME = side_pb2.SideResponse(welcome=side_pb2.Welcome(session_id="s1", session_token="secret", epoch="e1"))
NOTICE = side_pb2.SideResponse(warm_tasks_pending=side_pb2.WarmTasksPending(pool_id="p1"))
Peer = Callable[[Callable[[socket.socket], None]], Path]


def attached(*, block_count: int = 8, part: int = 0) -> side_pb2.SideResponse:
    """Announces memory of 64 KiB; with more than eight blocks its pages do not fit."""
    plane = types_pb2.Plane(
        name="x", layer_count=1, data_type=types_pb2.DATA_TYPE_UINT8, page_bytes=8192, interior="mine"
    )
    layout = types_pb2.Layout(
        model="m", tp_size=1, block_tokens=16, order=types_pb2.BLOCK_ORDER_LAYER_MAJOR, planes=[plane]
    )
    span = types_pb2.PlaneSpan(name="x", layer_stride_bytes=block_count * 8192, block_stride_bytes=8192)
    descriptor = types_pb2.PoolDescriptor(
        pool_id="p1", arena_kind="host", layout=layout, block_count=block_count, size_bytes=SIZE_BYTES, spans=[span]
    )
    return side_pb2.SideResponse(attached=side_pb2.Attached(pool=descriptor, part=part))


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    """Starts a listener whose one connection is served by a function; joins it at the end."""
    threads: list[threading.Thread] = []
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "s.side"))
    listener.listen()

    def start(serve: Callable[[socket.socket], None]) -> Path:
        def run() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                serve(connection)

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        return tmp_path / "s.sock"

    yield start
    for thread in threads:
        thread.join(10)
    listener.close()


def greet(connection: socket.socket) -> None:
    """Answers a hello in pieces, with a notice before it, and reads the attach that follows."""
    connection.recv(4096)
    for byte in frame(NOTICE) + frame(WELCOME):
        connection.send(bytes([byte]))
    connection.recv(4096)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (struct.pack("<I", 2**20), "a frame of 1048576 bytes"),
        (struct.pack("<I", 3) + b"\xff\xff\xff", "no SideResponse"),
        (frame(attached()), "something else than a welcome"),
    ],
)
def test_what_is_no_answer_to_a_hello_is_a_bug(peer: Peer, answer: bytes, error: str) -> None:
    """Of the service: reported as such, and not waited for."""

    def serve(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(answer)
        connection.recv(1)

    with CppWorker() as worker, pytest.raises(CppError, match=error) as bug:
        worker.connect(peer(serve), 5000)
    assert bug.value.kind == "HarborError"


def test_a_service_that_says_nothing_is_given_up(peer: Peer) -> None:
    """At the deadline, half a frame or not."""

    def serve(connection: socket.socket) -> None:
        connection.sendall(b"\x01\x00")
        while connection.recv(4096):
            pass

    with CppWorker() as worker, pytest.raises(CppError, match="no answer") as late:
        worker.connect(peer(serve), 100)
    assert late.value.reason == "DEADLINE_EXCEEDED"


@pytest.mark.parametrize(
    ("memory_bytes", "seals", "cause"),
    [
        (SIZE_BYTES - 1, True, "it has 65535"),
        (SIZE_BYTES, False, "not sealed against shrinking"),
        (None, False, "not a memfd"),
    ],
)
def test_memory_that_would_fault_later_is_not_mapped(
    peer: Peer, memory_bytes: int | None, seals: bool, cause: str
) -> None:
    """M6: short, able to shrink, or no memfd at all."""

    def serve(connection: socket.socket) -> None:
        greet(connection)
        if memory_bytes is None:
            fd = os.open(require_build() / WORKER, os.O_RDONLY)
        else:
            fd = os.memfd_create("odd", os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, memory_bytes)
        if seals:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        socket.send_fds(connection, [frame(attached())], [fd])
        os.close(fd)
        connection.recv(1)

    with CppWorker() as worker:
        worker.connect(peer(serve), 5000)
        with pytest.raises(CppError, match=cause) as unfit:
            worker.attach_pool("p1", 0)
        assert (unfit.value.kind, unfit.value.reason) == ("StateRefused", "ARENA_UNFIT")
        worker.kill()


def test_pages_outside_of_the_memory_are_refused(peer: Peer) -> None:
    """M3: numbers from the wire are checked before they become an address."""

    def serve(connection: socket.socket) -> None:
        greet(connection)
        socket.send_fds(connection, [frame(attached(block_count=9))], [0])
        connection.recv(1)

    with CppWorker() as worker:
        worker.connect(peer(serve), 5000)
        with pytest.raises(CppError, match="outside of its memory"):
            worker.attach_pool("p1", 0)
        worker.kill()
