"""The API with nothing between: side socket frames and gRPC stubs, for tests of the service itself."""

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from kvharbor.v1 import (
    cache_service_pb2_grpc,
    pool_service_pb2,
    pool_service_pb2_grpc,
    side_pb2,
    types_pb2,
)

DEADLINE_S = 10.0
BLOCK_TOKENS = 16
BLOCK_BYTES = 1024
_LENGTH = struct.Struct("<I")


def small_layout(**changes: Any) -> types_pb2.Layout:
    """Returns a layout of one plane with blocks of 16 tokens and 1,024 bytes."""
    plane = types_pb2.Plane(
        name="k",
        layer_count=1,
        data_type=types_pb2.DATA_TYPE_FLOAT32,
        page_bytes=BLOCK_BYTES,
        interior="token_head_dim",
        head_count=1,
        head_dim=16,
    )
    layout = types_pb2.Layout(
        model="m",
        tp_size=1,
        block_tokens=BLOCK_TOKENS,
        scratch_block_count=1,
        order=types_pb2.BLOCK_ORDER_LAYER_MAJOR,
        planes=[plane],
    )
    for name, value in changes.items():
        setattr(layout, name, value)
    return layout


def tokens(*ids: int) -> bytes:
    """Returns token ids as they travel."""
    return struct.pack(f"<{len(ids)}I", *ids)


def side_connection(grpc_path: str) -> socket.socket:
    """Returns a connection to the side socket of the service at `grpc_path`, without a hello."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(DEADLINE_S)
    try:
        connection.connect(f"{grpc_path.removesuffix('.sock')}.side")
    except OSError:
        connection.close()
        raise
    return connection


def ask(connection: socket.socket, request: side_pb2.SideRequest) -> tuple[side_pb2.SideResponse, list[int]]:
    """Sends one frame and returns the answer with its descriptors, which are the caller's."""
    encoded = request.SerializeToString()
    connection.sendall(_LENGTH.pack(len(encoded)) + encoded)
    return answer(connection)


def answer(connection: socket.socket) -> tuple[side_pb2.SideResponse, list[int]]:
    """Returns the next frame with its descriptors; raises ConnectionError at the end of the stream."""
    head, fds, _, _ = socket.recv_fds(connection, _LENGTH.size, maxfds=1)
    if len(head) < _LENGTH.size:
        raise ConnectionError("the side socket has ended")
    data = bytearray()
    length = _LENGTH.unpack(head)[0]
    while len(data) < length:
        data += connection.recv(length - len(data))
    return side_pb2.SideResponse.FromString(bytes(data)), fds


def hello(name: str = "test", versions: tuple[str, ...] = ("v1",)) -> side_pb2.SideRequest:
    """Returns the first request of a session."""
    return side_pb2.SideRequest(hello=side_pb2.Hello(client_name=name, client_version="raw", api_versions=versions))


class RawCaller:
    """A session with stubs of both services; `metadata` is what its calls carry."""

    def __init__(self, grpc_path: str) -> None:
        self.side = side_connection(grpc_path)
        try:
            self.welcome = ask(self.side, hello())[0].welcome
        except OSError:
            self.side.close()
            raise
        self.metadata = (("kvharbor-session", self.welcome.session_token),)
        self.channel = grpc.insecure_channel(f"unix:{grpc_path}", options=[("grpc.enable_http_proxy", 0)])
        self.pools = pool_service_pb2_grpc.PoolServiceStub(self.channel)
        self.cache = cache_service_pb2_grpc.CacheServiceStub(self.channel)

    def call(self, method: Any, request: Any, **options: Any) -> Any:
        """Calls a stub's method in the session's name."""
        return method(request, metadata=self.metadata, timeout=DEADLINE_S, **options)

    def open_pool(self, name: str, *, block_count: int = 64, layout: types_pb2.Layout | None = None) -> str:
        """Opens a pool with so many usable blocks of the small layout; returns its id."""
        opening = pool_service_pb2.OpenPoolRequest(
            name=name, layout=layout or small_layout(), size_bytes=(block_count + 1) * BLOCK_BYTES
        )
        response = self.call(self.pools.OpenPool, opening)
        return str(response.descriptor.pool_id)

    def attach(self, pool_id: str) -> tuple[side_pb2.SideResponse, list[int]]:
        """Asks for a pool's memory on the side socket."""
        return ask(self.side, side_pb2.SideRequest(attach=side_pb2.Attach(pool_id=pool_id)))

    def close(self) -> None:
        """Closes channel and side socket: the session ends by it."""
        self.channel.close()
        self.side.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Refused:
    """What a call was refused with: gRPC code, reason, metadata and the whole status."""

    def __init__(self, failure: grpc.RpcError) -> None:
        self.code: grpc.StatusCode = failure.code()
        self.message = failure.details() or ""
        self.status: status_pb2.Status | None = rpc_status.from_call(failure)
        info = error_details_pb2.ErrorInfo()
        for detail in self.status.details if self.status is not None else ():
            if detail.Is(info.DESCRIPTOR):
                detail.Unpack(info)
        self.reason = info.reason
        self.domain = info.domain
        self.metadata = dict(info.metadata)


@contextlib.contextmanager
def refused() -> Iterator[list[Refused]]:
    """Expects the call within to fail; the list has its refusal afterwards."""
    found: list[Refused] = []
    try:
        yield found
    except grpc.RpcError as failure:
        found.append(Refused(failure))
    assert found, "the call was not refused"


def open_descriptor_count(pid: int) -> int:
    """Returns how many file descriptors a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 - names only
