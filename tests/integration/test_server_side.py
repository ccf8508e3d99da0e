"""The side socket: frames, hello, memory, and the end of a session."""

import contextlib
import os
import socket
import struct

import pytest

from conftest import StartService
from kvharbor.v1 import errors_pb2, side_pb2
from raw_caller import BLOCK_BYTES, RawCaller, answer, ask, hello, open_descriptor_count, side_connection
from service_process import ServiceProcess
from waiting import until

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
        descriptor = response.attached.pool
        assert (descriptor.block_count, descriptor.size_bytes) == (5, 5 * BLOCK_BYTES)
        os.pwrite(one, b"here", BLOCK_BYTES)
        assert os.pread(two, 4, BLOCK_BYTES) == b"here"
        os.close(one)
        os.close(two)


def test_sessions_leave_no_descriptor_in_the_service(service: ServiceProcess) -> None:
    """Neither those that end well, nor those that are lost or refused; the supervisor keeps none either."""
    path = str(service.socket)
    with RawCaller(path) as first:
        pool_id = first.open_pool("p")
        pids = (service.process.pid, service.child_pid)
        before = [open_descriptor_count(pid) for pid in pids]
        for number in range(20):
            with RawCaller(path) as caller:
                caller.open_pool("p")
                os.close(caller.attach(pool_id)[1][0])
                caller.resume()
                if number % 2:
                    caller.abandon()
            with side_connection(path) as connection:
                ask(connection, side_pb2.SideRequest())
        # gRPC closes its connections a moment after the client has: wait for that, not for a time.
        until(
            lambda: [open_descriptor_count(pid) for pid in pids],
            lambda now: all(count <= most for count, most in zip(now, before, strict=True)),
        )
