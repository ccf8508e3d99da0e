"""The API with nothing between: side socket frames and gRPC stubs, for tests of the service itself."""

import contextlib
import functools
import os
import queue
import socket
import struct
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from kvharbor.v1 import (
    cache_service_pb2,
    cache_service_pb2_grpc,
    errors_pb2,
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
    head, fds, _, _ = socket.recv_fds(connection, _LENGTH.size, maxfds=64)
    if len(head) < _LENGTH.size:
        raise ConnectionError("the side socket has ended")
    data = bytearray()
    length = _LENGTH.unpack(head)[0]
    while len(data) < length:
        data += connection.recv(length - len(data))
    return side_pb2.SideResponse.FromString(bytes(data)), fds


def hello(name: str = "test", versions: tuple[str, ...] = ("v1",), **asked: Any) -> side_pb2.SideRequest:
    """Returns the first request on a side socket; `asked` may have `join` or `resume`."""
    greeting = side_pb2.Hello(client_name=name, client_version="raw", api_versions=versions, **asked)
    return side_pb2.SideRequest(hello=greeting)


def joining(
    join_token: str, rank: int, mode: side_pb2.MemberMode.ValueType = side_pb2.MEMBER_MODE_UNSPECIFIED
) -> side_pb2.SideRequest:
    """Returns the hello of a session's further process."""
    return hello(join=side_pb2.Join(join_token=join_token, rank=rank, mode=mode))


def attaching(pool_id: str, **asked: Any) -> side_pb2.SideRequest:
    """Returns the request for a pool's memory; `asked` may have `part` and `device_view`."""
    return side_pb2.SideRequest(attach=side_pb2.Attach(pool_id=pool_id, **asked))


def resuming(token: str, epoch: str) -> side_pb2.SideRequest:
    """Returns the hello of a process that goes on with a session."""
    return hello(resume=side_pb2.Resume(token=token, epoch=epoch))


def greeted(grpc_path: str, request: side_pb2.SideRequest) -> tuple[socket.socket, side_pb2.SideResponse]:
    """Returns a side socket and the answer to its hello."""
    connection = side_connection(grpc_path)
    try:
        return connection, ask(connection, request)[0]
    except OSError:
        connection.close()
        raise


def held_sequence(
    sequence: types_pb2.Sequence, *, committed_tokens: int = 0, tail: bytes = b"", **changes: Any
) -> cache_service_pb2.HeldSequence:
    """Returns a sequence as its owner has it; `changes` are cursors that went on since the service told them."""
    present = types_pb2.Sequence()
    present.CopyFrom(sequence)
    for name, value in changes.items():
        setattr(present, name, value)
    return cache_service_pb2.HeldSequence(sequence=present, committed_tokens=committed_tokens, tail_token_ids=tail)


class RawCaller:
    """A session with stubs of both services; `metadata` is what its calls carry."""

    def __init__(self, grpc_path: str) -> None:
        self.path = grpc_path
        self.side, response = greeted(grpc_path, hello())
        self.older_sides: list[socket.socket] = []
        self.abandoned = False
        self.welcome = response.welcome
        self.metadata = (("kvharbor-session", self.welcome.session_token),)
        self.channel = grpc.insecure_channel(f"unix:{grpc_path}", options=[("grpc.enable_http_proxy", 0)])
        self.pools = pool_service_pb2_grpc.PoolServiceStub(self.channel)
        self.cache = cache_service_pb2_grpc.CacheServiceStub(self.channel)

    def call(self, method: Any, request: Any, **options: Any) -> Any:
        """Calls a stub's method in the session's name."""
        return method(request, metadata=self.metadata, timeout=DEADLINE_S, **options)

    def record(self, pool_id: str) -> tuple[Any, Callable[[], None]]:
        """Begins to record a pool; returns the stream, and what stops it."""
        requests: queue.SimpleQueue[cache_service_pb2.RecordRequest | None] = queue.SimpleQueue()
        stop = functools.partial(requests.put, None)
        requests.put(cache_service_pb2.RecordRequest(pool_id=pool_id))
        stream = self.call(self.cache.Record, iter(requests.get, None))
        if not stream.add_callback(stop):
            stop()
        return stream, stop

    def open_pool(self, name: str, *, block_count: int = 64, layout: types_pb2.Layout | None = None) -> str:
        """Opens a pool with so many usable blocks of the small layout; returns its id."""
        opening = pool_service_pb2.OpenPoolRequest(
            name=name, layout=layout or small_layout(), size_bytes=(block_count + 1) * BLOCK_BYTES
        )
        response = self.call(self.pools.OpenPool, opening)
        return str(response.pool.pool_id)

    def attach(self, pool_id: str, **asked: Any) -> tuple[side_pb2.SideResponse, list[int]]:
        """Asks for a pool's memory on the side socket."""
        return ask(self.side, attaching(pool_id, **asked))

    def allocate(self, pool_id: str, *ids: int, **fields: Any) -> types_pb2.Sequence:
        """Allocates a prompt of these tokens; returns the sequence."""
        request = cache_service_pb2.AllocateRequest(pool_id=pool_id, token_ids=tokens(*ids), **fields)
        response: cache_service_pb2.AllocateResponse = self.call(self.cache.Allocate, request)
        return response.sequence

    def commit(self, pool_id: str, sequence_id: str, computed_tokens: int, **fields: Any) -> Any:
        """Commits one sequence; returns the result of the item."""
        item = cache_service_pb2.CommitItem(sequence_id=sequence_id, computed_tokens=computed_tokens, **fields)
        request = cache_service_pb2.CommitRequest(pool_id=pool_id, items=[item])
        return self.call(self.cache.Commit, request).results[0]

    def stats(self, pool_id: str) -> Any:
        """Returns the snapshot of one pool."""
        return self.call(self.cache.Stats, cache_service_pb2.StatsRequest(pool_id=pool_id)).pools[0]

    def resume(self) -> side_pb2.SideResponse:
        """Goes on with the session on a further side socket; returns the answer to its hello."""
        request = resuming(self.welcome.session_token, self.welcome.epoch)
        side, response = greeted(self.path, request)
        while response.refused.reason == errors_pb2.ERROR_REASON_STARTING:
            side.close()
            side, response = greeted(self.path, request)
        self.older_sides.append(self.side)
        self.side = side
        return response

    def resume_pool(self, pool_id: str, *held: cache_service_pb2.HeldSequence, complete: bool = True) -> Any:
        """Tells the service what the session holds in a pool."""
        request = cache_service_pb2.ResumeRequest(pool_id=pool_id, sequences=held, complete=complete)
        return self.call(self.cache.Resume, request)

    def close(self) -> None:
        """Ends the session, which asserts that nothing of this process touches a block any more."""
        if not self.abandoned:
            with contextlib.suppress(grpc.RpcError):  # the service may be gone
                self.call(self.pools.CloseSession, pool_service_pb2.CloseSessionRequest())
            self.abandon()

    def abandon(self) -> None:
        """Closes channel and side sockets without a word: the session is lost, and this process lives on."""
        self.abandoned = True
        self.channel.close()
        for side in (*self.older_sides, self.side):
            side.close()

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
