"""What ends with the process of a `FakeService`: its gRPC server, and the thread that serves side sockets."""

import contextlib
import select
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from kvharbor.v1 import cache_service_pb2 as cache
from kvharbor.v1 import errors_pb2, side_pb2, types_pb2
from kvharbor.v1 import pool_service_pb2 as pools
from kvharbor.v1 import stream_service_pb2 as stream_pb2

DEADLINE_S = 10.0
_LENGTH = struct.Struct("<I")
_SERVICES = {
    "kvharbor.v1.CacheService": (
        "Allocate",
        "Extend",
        "Commit",
        "Fork",
        "Handoff",
        "Adopt",
        "Release",
        "Resume",
        "Stats",
        "Unwarm",
    ),
    "kvharbor.v1.PoolService": ("OpenPool", "ListPools", "DropPool", "CloseSession", "GetServerInfo"),
}


def peek(connection: socket.socket) -> bytes:
    """What there is to read on an accepted socket that does not block: nothing once the client has closed it."""
    try:
        return connection.recv(1)
    except BlockingIOError:
        return b"open"
    except ConnectionResetError:  # with something unread
        return b""


class Answers(Protocol):
    """Who answers, whichever process asks."""

    path: Path
    accepted: list[socket.socket]

    def answer(self, method: str, request: Any, context: grpc.ServicerContext) -> Any:
        """Answers a call."""

    def converse(self, process: Any, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        """Serves a stream that has come to this process."""

    def side_answer(self, request: side_pb2.SideRequest) -> tuple[side_pb2.SideResponse, tuple[int, ...]]:
        """Answers one frame, with descriptors."""


class Process:
    """Serves `answers` from `start` to `end`."""

    def __init__(self, answers: Answers, listener: socket.socket) -> None:
        self._answers = answers
        self._server = grpc.server(ThreadPoolExecutor(16))
        for name, methods in _SERVICES.items():
            self._server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(name, self._handlers(methods)),)
            )
        stream: Any = grpc.stream_stream_rpc_method_handler(
            lambda requests, context: answers.converse(self, requests, context),
            request_deserializer=stream_pb2.ConverseRequest.FromString,
            response_serializer=lambda response: response.SerializeToString(),
        )
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("kvharbor.v1.StreamService", {"Converse": stream}),)
        )
        self._listener = listener
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._serve)

    def start(self) -> None:
        """Begins to serve."""
        # A server that stops removes the path that it was bound to: by then it must not be the next one's.
        own_path = self._answers.path.with_suffix(f".{id(self):x}")
        self._server.add_insecure_port(f"unix:{own_path}")
        self._server.start()
        own_path.rename(self._answers.path)
        self._thread.start()

    def end(self) -> None:
        """Breaks off what is under way."""
        self._wake.close()
        self._thread.join(DEADLINE_S)
        self._woken.close()
        self._server.stop(0)

    def _handlers(self, methods: tuple[str, ...]) -> dict[str, Any]:
        def handler(method: str) -> Any:
            kind = getattr(cache, f"{method}Request", None) or getattr(pools, f"{method}Request")
            return grpc.unary_unary_rpc_method_handler(
                lambda request, context: self._answers.answer(method, request, context),
                request_deserializer=kind.FromString,
                response_serializer=lambda reply: reply.SerializeToString(),
            )

        return {method: handler(method) for method in methods}

    def _serve(self) -> None:
        own: list[socket.socket] = []
        while True:
            readable = _readable([self._woken, self._listener, *own])
            if self._woken in readable:
                return
            for connection in readable:
                if connection is self._listener:
                    own.append(connection.accept()[0])
                    self._answers.accepted.append(own[-1])
                elif not self._exchange(connection):
                    own.remove(connection)

    def _exchange(self, connection: socket.socket) -> bool:
        try:
            head = connection.recv(_LENGTH.size, socket.MSG_WAITALL)
        except ConnectionResetError:  # closed, with an answer unread
            return False
        if len(head) < _LENGTH.size:
            return False
        payload = connection.recv(_LENGTH.unpack(head)[0], socket.MSG_WAITALL)
        response, fds = self._answers.side_answer(side_pb2.SideRequest.FromString(payload))
        data = response.SerializeToString()
        with contextlib.suppress(BrokenPipeError):  # ended meanwhile
            socket.send_fds(connection, [_LENGTH.pack(len(data)) + data], fds)
        return True


def refused(reason: str, **metadata: str) -> side_pb2.SideResponse:
    """Returns a refusal on the side socket."""
    return side_pb2.SideResponse(refused=side_pb2.Refused(reason=_number(reason), message=reason, metadata=metadata))


def refused_item(reason: str, code: int) -> types_pb2.ItemStatus:
    """Returns the refusal of an item of a batch."""
    return types_pb2.ItemStatus(code=code, reason=_number(reason), message=reason)


def abort(context: grpc.ServicerContext, code: grpc.StatusCode, reason: str) -> None:
    """Refuses a call."""
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(domain="kvharbor", reason=reason))
    context.abort_with_status(
        rpc_status.to_status(status_pb2.Status(code=code.value[0], message=reason, details=[detail]))
    )


def _number(reason: str) -> errors_pb2.ErrorReason.ValueType:
    return errors_pb2.ErrorReason.Value(f"ERROR_REASON_{reason}")


def _readable(sockets: list[socket.socket]) -> list[socket.socket]:
    found, _, _ = select.select(sockets, [], [], DEADLINE_S)
    return list(found)
