"""The side socket: frames, hello, memory, and the end of a session."""

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time

import pytest

from conftest import StartService
from kvharbor.v1 import cache_service_pb2 as cache
from kvharbor.v1 import errors_pb2, side_pb2
from raw_caller import BLOCK_BYTES, RawCaller, answer, ask, hello, open_descriptor_count, side_connection, tokens
from service_process import ServiceProcess

LENGTH = struct.Struct("<I")


def is_closed(connection: socket.socket) -> bool:
    """Tells whether the service has closed the connection, waiting for it."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_hello_is_answered_with_who_the_caller_is(harbor: str) -> None:
    """Tenant by the kernel's word on the connecting process; tokens are secret and each its own."""
    with RawCaller(harbor) as first, RawCaller(harbor) as second:
        assert first.welcome.tenant == f"uid-{os.getuid()}"
        assert (first.welcome.api_version, first.welcome.epoch) == ("v1", second.welcome.epoch)
        assert first.welcome.session_token != second.welcome.session_token
        assert len(first.welcome.session_token) >= 32


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (hello(versions=("v2",)), errors_pb2.ERROR_REASON_INVALID_FIELD),
        (hello(name="n" * 129), errors_pb2.ERROR_REASON_INVALID_FIELD),
        (side_pb2.SideRequest(), errors_pb2.ERROR_REASON_SESSION_REQUIRED),
        (side_pb2.SideRequest(attach=side_pb2.Attach(pool_id="1.1")), errors_pb2.ERROR_REASON_SESSION_REQUIRED),
    ],
)
def test_a_hello_that_is_none_is_refused_and_the_socket_closed(
    harbor: str, request_: side_pb2.SideRequest, reason: errors_pb2.ErrorReason.ValueType
) -> None:
    """With a reason as anywhere else."""
    with side_connection(harbor) as connection:
        response, _ = ask(connection, request_)
        assert response.refused.reason == reason
        assert is_closed(connection)


@pytest.mark.parametrize("frame", [LENGTH.pack(65537), LENGTH.pack(2**32 - 1), LENGTH.pack(3) + b"\xff\xff\xff"])
def test_a_frame_that_is_none_ends_the_connection(harbor: str, frame: bytes) -> None:
    """Nothing of an unbounded length is ever waited for."""
    with side_connection(harbor) as connection:
        connection.sendall(frame)
        assert is_closed(connection)


def test_a_frame_in_pieces_is_a_frame(harbor: str) -> None:
    """A stream socket cuts where it likes."""
    encoded = hello().SerializeToString()
    with side_connection(harbor) as connection:
        for byte in LENGTH.pack(len(encoded)) + encoded:
            connection.send(bytes([byte]))
        response, _ = answer(connection)
        assert response.HasField("welcome")


def test_who_does_not_say_hello_is_let_go(start_fresh: StartService) -> None:
    """A connection that says nothing holds a descriptor of the service."""
    service = start_fresh(hello_timeout_s="0.05")
    with side_connection(str(service.socket)) as connection:
        assert is_closed(connection)


def test_no_more_sessions_than_set(start_fresh: StartService) -> None:
    """The next one is closed at once, and there is room again when one ends."""
    service = start_fresh(max_sessions="1")
    path = str(service.socket)
    with RawCaller(path), side_connection(path) as refused:
        assert is_closed(refused)
    while True:
        # The place is free a moment after the session's end is seen from outside.
        with contextlib.suppress(OSError), RawCaller(path) as caller:
            assert caller.welcome.session_token
            break


def test_memory_goes_to_those_who_have_opened_the_pool(harbor: str) -> None:
    """What one writes through its mapping another reads, and scratch blocks come first."""
    with RawCaller(harbor) as first, RawCaller(harbor) as second:
        pool_id = first.open_pool("side-memory", block_count=4)
        response, fds = second.attach(pool_id)
        assert (response.refused.reason, fds) == (errors_pb2.ERROR_REASON_POOL_NOT_FOUND, [])
        second.open_pool("side-memory", block_count=4)
        (one,) = first.attach(pool_id)[1]
        response, (two,) = second.attach(pool_id)
        descriptor = response.attached.descriptor
        assert (descriptor.block_count, descriptor.size_bytes) == (5, 5 * BLOCK_BYTES)
        os.pwrite(one, b"here", BLOCK_BYTES)
        assert os.pread(two, 4, BLOCK_BYTES) == b"here"
        os.close(one)
        os.close(two)


def test_the_end_of_the_socket_ends_the_session(service: ServiceProcess) -> None:
    """What was committed stays, what was not is free, and the holds are gone."""
    path = str(service.socket)
    with RawCaller(path) as watcher:
        pool_id = watcher.open_pool("p", block_count=8)
        with RawCaller(path) as lost:
            lost.open_pool("p", block_count=8)
            request = cache.AllocateRequest(pool_id=pool_id, token_ids=tokens(*range(32)), reserve_tokens=32)
            sequence = lost.call(lost.cache.Allocate, request).sequence
            item = cache.CommitItem(sequence_id=sequence.sequence_id, computed_tokens=20)
            lost.call(lost.cache.Commit, cache.CommitRequest(pool_id=pool_id, items=[item]))
        service.wait_for("session ended")
        stats = watcher.call(watcher.cache.Stats, cache.StatsRequest(pool_id=pool_id)).pools[0]
        counts = (stats.free_block_count, stats.cached_block_count, stats.sequence_count)
        assert counts == (7, 1, 0)


def test_a_killed_worker_is_gone_within_a_second(service: ServiceProcess) -> None:
    """G6: its death closes its socket, whatever it was doing."""
    path = str(service.socket)
    program = (
        "import sys, raw_caller as r\n"
        "from kvharbor.v1 import cache_service_pb2 as c\n"
        f"caller = r.RawCaller({path!r})\n"
        "pool_id = caller.open_pool('p')\n"
        "caller.call(caller.cache.Allocate, c.AllocateRequest(pool_id=pool_id, token_ids=r.tokens(1)))\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    worker = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.path.dirname(__file__) + "/.."},  # noqa: PTH120
    )
    assert worker.stdout is not None
    assert worker.stdin is not None
    assert worker.stdout.readline() == b"held\n"
    killed_at = time.monotonic()
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    ended = service.wait_for("session ended")
    assert time.monotonic() - killed_at < 1
    assert ended["released_sequence_count"] == 1
    worker.stdout.close()
    worker.stdin.close()


def test_sessions_leave_no_descriptor_in_the_service(service: ServiceProcess) -> None:
    """Neither those that end well nor those that are refused."""
    path = str(service.socket)
    with RawCaller(path) as first:
        pool_id = first.open_pool("p")
        before = open_descriptor_count(service.process.pid)
        for _ in range(10):
            with RawCaller(path) as caller:
                caller.open_pool("p")
                os.close(caller.attach(pool_id)[1][0])
            with side_connection(path) as connection:
                ask(connection, side_pb2.SideRequest())
        # gRPC closes its connections a moment after the client has: wait for that, not for a time.
        while open_descriptor_count(service.process.pid) > before:
            pass
