"""Descriptors on the side socket: all of a frame arrive, and none stays open that nobody wants."""

import errno
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvharbor.client import DeviceNotVisible, HarborError, ServiceBug, SessionLost
from kvharbor.client.frames import MAX_DESCRIPTORS
from kvharbor.client.options import Options
from kvharbor.client.side import SideSocket
from kvharbor.v1 import errors_pb2, side_pb2
from side_frames import WELCOME, frame, notice, read_request

pytestmark = pytest.mark.usefixtures("no_leaks")
ATTACHED = frame(side_pb2.SideResponse(attached=side_pb2.Attached()))
REFUSED = frame(
    side_pb2.SideResponse(refused=side_pb2.Refused(reason=errors_pb2.ERROR_REASON_DEVICE_NOT_VISIBLE, message="no"))
)


@contextmanager
def served(folder: Path, answer: Callable[[socket.socket], None]) -> Iterator[SideSocket]:
    """Yields a session whose next request is answered by `answer`."""
    path = str(folder / "s.side")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        def serve() -> None:
            with listener.accept()[0] as connection:
                read_request(connection)
                connection.sendall(frame(WELCOME))
                read_request(connection)
                answer(connection)
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        side, _ = SideSocket.open(path, Options().hello(), timeout_s=10.0)
        try:
            yield side
        finally:
            side.close()
            thread.join(10)


@contextmanager
def pipes(count: int) -> Iterator[list[int]]:
    """Yields the ends of one pipe, the reading one first, the writing one so many times."""
    read_end, write_end = os.pipe()
    copies = [write_end, *(os.dup(write_end) for _ in range(count - 1))]
    try:
        yield [read_end, *copies]
    finally:
        os.close(read_end)
        for fd in copies:
            os.close(fd)


@pytest.mark.parametrize("count", [0, 1, 2, MAX_DESCRIPTORS])
def test_every_descriptor_of_a_frame_arrives_in_order(tmp_path: Path, count: int) -> None:
    """A device arena has one a chunk; no child inherits them."""
    files = [os.memfd_create(f"chunk-{number}") for number in range(count)]

    def answer(connection: socket.socket) -> None:
        socket.send_fds(connection, [ATTACHED], files)

    with served(tmp_path, answer) as side:
        _, fds = side.attach(side_pb2.Attach())
    names = [Path(f"/proc/self/fd/{fd}").readlink().name for fd in fds]
    assert names == [f"memfd:chunk-{number} (deleted)" for number in range(count)]
    assert not any(os.get_inheritable(fd) for fd in fds)
    for fd in (*fds, *files):
        os.close(fd)


ODD_ANSWERS: dict[str, tuple[list[bytes], type[HarborError]]] = {
    "refused": ([REFUSED], DeviceNotVisible),
    "not an answer": ([frame(WELCOME)], ServiceBug),
    "of another part": ([frame(side_pb2.SideResponse(attached=side_pb2.Attached(part=3)))], ServiceBug),
    "with a notice": ([notice("p"), REFUSED], DeviceNotVisible),
    "no message": ([b"\x02\x00\x00\x00\xff\xff"], ServiceBug),
    "too long": ([b"\xff\xff\xff\xff"], ServiceBug),
    "cut off in its length": ([ATTACHED[:2]], SessionLost),
    "cut off in its message": ([ATTACHED[:5]], SessionLost),
}


@pytest.mark.parametrize("kind", ODD_ANSWERS)
def test_descriptors_of_an_answer_that_is_not_taken_are_closed(tmp_path: Path, kind: str) -> None:
    """Whatever is wrong with it: they belong to nobody then."""
    parts, expected = ODD_ANSWERS[kind]
    with pipes(3) as (_, *fds):

        def answer(connection: socket.socket) -> None:
            for part in parts:
                socket.send_fds(connection, [part], fds)

        with served(tmp_path, answer) as side, pytest.raises(expected):
            side.attach(side_pb2.Attach())


def test_more_descriptors_than_an_arena_has_are_a_bug_of_the_service(tmp_path: Path) -> None:
    """Those that were taken are closed; the kernel closes the others."""
    with pipes(MAX_DESCRIPTORS + 1) as (_, *fds):

        def answer(connection: socket.socket) -> None:
            socket.send_fds(connection, [ATTACHED], fds)

        with served(tmp_path, answer) as side, pytest.raises(ServiceBug):
            side.attach(side_pb2.Attach())


def test_a_process_that_may_open_no_more_descriptors_is_told_so(tmp_path: Path) -> None:
    """The kernel drops what does not fit: to map the rest would be wrong, and the limit is the cause."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pipes(4) as (_, *fds):

        def answer(connection: socket.socket) -> None:
            free = os.dup(0)
            os.close(free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (free + 2, hard))
            socket.send_fds(connection, [ATTACHED], fds)

        try:
            with served(tmp_path, answer) as side, pytest.raises(OSError, match="RLIMIT_NOFILE") as error:
                side.attach(side_pb2.Attach())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert error.value.errno == errno.EMFILE
