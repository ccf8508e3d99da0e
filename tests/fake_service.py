"""A service in the test's own process whose "process" ends and comes back at exactly the moment a test wants.

It has what its client can see of a service: a side socket whose listener and accepted sockets outlive the process,
sequences that do not, and one pool of memory an epoch. There is no prefix cache: nothing is ever reused.
"""

import contextlib
import queue
import select
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from contract.leaks import mapped_arenas
from kvharbor.client import descriptors
from kvharbor.gpumem import Descriptor, HostArena, Layout
from kvharbor.v1 import cache_service_pb2 as cache
from kvharbor.v1 import errors_pb2, side_pb2, types_pb2
from kvharbor.v1 import pool_service_pb2 as pools

TOKEN = "leader"
JOIN_TOKEN = "join"
MEMBER_TOKEN = "member"
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
    "kvharbor.v1.PoolService": ("OpenPool", "CloseSession", "GetServerInfo"),
}


class FakeService:
    """One session's service. `calls` has every request that was answered or begun, by the method's name.

    `before` and `after` have what is run before a method takes effect, and before its reply leaves.
    """

    def __init__(self, folder: Path, layout: Layout, block_count: int) -> None:
        self.path = folder / "kv.sock"
        self.layout = layout
        self.descriptor: Descriptor = layout.descriptor(block_count)
        self.epoch = "e1"
        self.calls: dict[str, list[Any]] = defaultdict(list)
        self.before: dict[str, Callable[[], None]] = {}
        self.after: dict[str, Callable[[], None]] = {}
        self.refuse_resume: dict[str, types_pb2.ItemStatus] = {}
        self.hellos: queue.Queue[side_pb2.Hello] = queue.Queue()
        self.resumes: queue.Queue[cache.ResumeRequest] = queue.Queue()
        self.accepted: list[socket.socket] = []
        self.sequences: dict[str, types_pb2.Sequence] = {}
        self.resumed = True
        self.opened = False
        self._numbers = iter(range(1, 10_000))
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.path.with_suffix(".side")))
        self._listener.listen()
        self._arena = self._new_arena()
        self._running: Process | None = None
        self.begin()

    @property
    def target(self) -> str:
        """The address for clients."""
        return f"unix:{self.path}"

    @property
    def pool_id(self) -> str:
        """The one pool's id in this epoch."""
        return f"{self.epoch}.1"

    def mapped_epochs(self) -> set[str]:
        """The epochs whose memory is mapped in this process."""
        mark = f"kvharbor-{id(self):x}-"
        return {line.split(mark)[1].split()[0] for line in mapped_arenas() if mark in line}

    @property
    def memory(self) -> bytes:
        """The pool's bytes in this epoch, as another process would see them."""
        return bytes(self._mapping.buffer)

    def begin(self) -> None:
        """Starts the process."""
        self._running = Process(self, self._listener)

    def kill(self) -> None:
        """Ends the process: calls break off, sequences are forgotten, and whoever holds a side socket sees its end."""
        running, self._running = self._running, None
        if running is not None:
            running.end()
        self.blink()

    def blink(self) -> None:
        """Forgets what a process forgets, while the calls under way are still answered: an answer that comes late."""
        self.sequences.clear()
        self.resumed = False
        for connection in [*self.accepted]:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)

    def restart(self) -> None:
        """Ends the process and starts the next one, which has all that is kept."""
        self.kill()
        self.begin()

    def new_epoch(self) -> None:
        """Ends the process and starts another service, which knows of nothing."""
        self.kill()
        for connection in self.accepted:
            connection.close()
        self.accepted.clear()
        self.epoch = f"e{int(self.epoch[1:]) + 1}"
        self._mapping.close()
        self._arena.close()
        self._arena = self._new_arena()
        self.resumed, self.opened = True, False
        self.begin()

    def wait_until_resumed(self) -> cache.ResumeRequest:
        """Returns the next Resume that completes one."""
        return self.resumes.get(timeout=DEADLINE_S)

    def leave(self) -> None:
        """Ends for good: nobody listens any more."""
        self.kill()
        self._listener.close()
        self.path.with_suffix(".side").unlink()

    def close(self) -> None:
        """Ends everything."""
        self.kill()
        self._listener.close()
        for connection in self.accepted:
            connection.close()
        self._mapping.close()
        self._arena.close()

    def _new_arena(self) -> HostArena:
        arena = HostArena.create(self.descriptor.size_bytes, name=f"kvharbor-{id(self):x}-{self.epoch}")
        self._mapping = arena.map()
        return arena

    # The side socket

    def side_answer(self, request: side_pb2.SideRequest) -> tuple[side_pb2.SideResponse, int | None]:
        """Answers one frame."""
        if request.WhichOneof("request") == "attach":
            if not self.opened:
                return _refused("POOL_NOT_FOUND", poolId=request.attach.pool_id), None
            return side_pb2.SideResponse(attached=side_pb2.Attached(descriptor=self.description())), self._arena.fd
        hello = request.hello
        self.hellos.put(hello)
        if hello.HasField("resume") and hello.resume.epoch != self.epoch:
            return _refused("STALE_EPOCH", epoch=hello.resume.epoch, currentEpoch=self.epoch), None
        if hello.HasField("resume") and hello.resume.token not in (TOKEN, MEMBER_TOKEN):
            return _refused("SESSION_UNKNOWN"), None
        member = hello.HasField("join") or (hello.HasField("resume") and hello.resume.token == MEMBER_TOKEN)
        welcome = side_pb2.Welcome(
            session_id="7",
            session_token="" if member else TOKEN,
            member_token=MEMBER_TOKEN if member else "",
            join_token="" if member else JOIN_TOKEN,
            epoch=self.epoch,
            opened_pool_ids=[self.pool_id] if self.opened else [],
        )
        return side_pb2.SideResponse(welcome=welcome), None

    def description(self) -> types_pb2.PoolDescriptor:
        """Describes the pool."""
        return types_pb2.PoolDescriptor(
            pool_id=self.pool_id,
            name="p",
            epoch=self.epoch,
            arena_kind="host",
            layout=descriptors.layout_message(self.layout),
            block_count=self.descriptor.block_count,
            size_bytes=self.descriptor.size_bytes,
            spans=[
                types_pb2.PlaneSpan(
                    name=span.plane.name,
                    offset_bytes=span.offset_bytes,
                    layer_stride_bytes=span.layer_stride_bytes,
                    block_stride_bytes=span.block_stride_bytes,
                )
                for span in self.descriptor.spans
            ],
        )

    # Calls

    def answer(self, method: str, request: Any, context: grpc.ServicerContext) -> Any:
        """Answers a call, unless the pool must be resumed first."""
        self.calls[method].append(request)
        process, broken_off = self._running, threading.Event()
        context.add_callback(broken_off.set)
        self.before.get(method, _nothing)()
        if method not in ("Resume", "OpenPool", "CloseSession", "GetServerInfo"):
            if request.pool_id != self.pool_id:
                _abort(context, grpc.StatusCode.FAILED_PRECONDITION, "STALE_EPOCH")
            if not self.resumed:
                _abort(context, grpc.StatusCode.FAILED_PRECONDITION, "RESUME_REQUIRED")
        reply = getattr(self, f"_{method.lower()}")(request)
        self.after.get(method, _nothing)()
        if self._running is not process:
            broken_off.wait(DEADLINE_S)
        return reply

    def _openpool(self, request: pools.OpenPoolRequest) -> pools.OpenPoolResponse:
        self.opened = True
        return pools.OpenPoolResponse(descriptor=self.description())

    def _closesession(self, request: pools.CloseSessionRequest) -> pools.CloseSessionResponse:
        return pools.CloseSessionResponse()

    def _getserverinfo(self, request: pools.GetServerInfoRequest) -> pools.GetServerInfoResponse:
        return pools.GetServerInfoResponse(epoch=self.epoch)

    def _stats(self, request: cache.StatsRequest) -> cache.StatsResponse:
        return cache.StatsResponse(pools=[cache.PoolStats(pool_id=self.pool_id, sequence_count=len(self.sequences))])

    def _allocate(self, request: cache.AllocateRequest) -> cache.AllocateResponse:
        token_count = len(request.token_ids) // 4
        sequence = self._sequence(token_count, token_count + request.reserve_tokens, request.request_id)
        sequence.group = request.group
        return cache.AllocateResponse(sequence=sequence)

    def _sequence(self, token_count: int, capacity: int, request_id: str) -> types_pb2.Sequence:
        number = next(self._numbers)
        sequence = types_pb2.Sequence(
            sequence_id=f"{self.pool_id}.7.{number}", token_count=token_count, request_id=request_id
        )
        self._grow(sequence, capacity)
        self.sequences[sequence.sequence_id] = sequence
        return sequence

    def _grow(self, sequence: types_pb2.Sequence, capacity: int) -> None:
        have = len(sequence.table.block_ids) // 4
        need = -(-capacity // self.layout.block_tokens)
        first = 1 + sum(len(other.table.block_ids) // 4 for other in self.sequences.values())
        added = np.arange(first, first + max(need - have, 0))
        sequence.table.block_ids += added.astype("<u4").tobytes()
        sequence.table.generations += np.full(len(added), 5, "<u8").tobytes()
        sequence.capacity_tokens = max(need, have) * self.layout.block_tokens

    def _extend(self, request: cache.ExtendRequest) -> cache.ExtendResponse:
        def one(item: cache.ExtendItem) -> cache.ExtendResult:
            sequence = self.sequences.get(item.sequence_id)
            if sequence is None:
                return cache.ExtendResult(status=_item("SEQUENCE_NOT_FOUND", 5))
            self._grow(sequence, item.capacity_tokens)
            added = types_pb2.BlockTable(
                block_ids=sequence.table.block_ids[4 * item.known_block_count :],
                generations=sequence.table.generations[8 * item.known_block_count :],
            )
            return cache.ExtendResult(added=added, capacity_tokens=sequence.capacity_tokens)

        return cache.ExtendResponse(results=[one(item) for item in request.items])

    def _commit(self, request: cache.CommitRequest) -> cache.CommitResponse:
        return cache.CommitResponse(results=[self._commit_one(item) for item in request.items])

    def _commit_one(self, item: cache.CommitItem) -> cache.CommitResult:
        sequence = self.sequences.get(item.sequence_id)
        if sequence is None:
            return cache.CommitResult(status=_item("SEQUENCE_NOT_FOUND", 5))
        new_count = len(item.new_token_ids) // 4
        if sequence.token_count == item.known_token_count:
            sequence.token_count += new_count
        elif sequence.token_count != item.known_token_count + new_count:
            return cache.CommitResult(status=_item("CURSOR_OUT_OF_RANGE", 11))
        sequence.computed_tokens = item.computed_tokens
        return cache.CommitResult(committed_tokens=self._whole(item.computed_tokens))

    def _whole(self, token_count: int) -> int:
        return token_count // self.layout.block_tokens * self.layout.block_tokens

    def _fork(self, request: cache.ForkRequest) -> cache.ForkResponse:
        parent = self.sequences[request.sequence_id]
        children = []
        for child in range(request.child_count):
            made = self._sequence(parent.token_count, parent.capacity_tokens, f"{request.request_id}/{child}")
            made.computed_tokens = made.cached_tokens = parent.computed_tokens
            children.append(made)
        return cache.ForkResponse(children=children)

    def _handoff(self, request: cache.HandoffRequest) -> cache.HandoffResponse:
        self._commit_one(request.commit)
        return cache.HandoffResponse(handoff_token=f"token of {request.commit.sequence_id}")

    def _adopt(self, request: cache.AdoptRequest) -> cache.AdoptResponse:
        sequence = self.sequences[request.handoff_token.removeprefix("token of ")]
        return cache.AdoptResponse(sequence=sequence, tail_token_ids=bytes(4 * sequence.token_count))

    def _unwarm(self, request: cache.UnwarmRequest) -> cache.UnwarmResponse:
        return cache.UnwarmResponse()

    def _release(self, request: cache.ReleaseRequest) -> cache.ReleaseResponse:
        for item in request.items:
            self.sequences.pop(item.sequence_id, None)
        return cache.ReleaseResponse(results=[cache.ReleaseResult(released_sequence_count=1) for _ in request.items])

    def _resume(self, request: cache.ResumeRequest) -> cache.ResumeResponse:
        results = []
        for held in request.sequences:
            refused = self.refuse_resume.get(held.sequence.sequence_id)
            if refused is not None:
                results.append(cache.ResumeResult(status=refused))
                continue
            self.sequences[held.sequence.sequence_id] = held.sequence
            committed = self._whole(held.sequence.computed_tokens)
            results.append(cache.ResumeResult(sequence=held.sequence, committed_tokens=committed))
        if request.complete:
            self.resumed = True
            self.resumes.put(request)
        return cache.ResumeResponse(results=results)


class Process:
    """What ends with the service's process: its gRPC server, and the thread that serves side sockets."""

    def __init__(self, service: FakeService, listener: socket.socket) -> None:
        self._service = service
        self._threads = ThreadPoolExecutor(16)
        self._server = grpc.server(self._threads)
        for name, methods in _SERVICES.items():
            self._server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(name, self._handlers(methods)),)
            )
        # A server that stops removes the path that it was bound to: by then it must not be the next one's.
        own_path = service.path.with_suffix(f".{id(self):x}")
        self._server.add_insecure_port(f"unix:{own_path}")
        self._server.start()
        own_path.rename(service.path)
        self._listener = listener
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._serve)
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
                lambda request, context: self._service.answer(method, request, context),
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
                    self._service.accepted.append(own[-1])
                elif not self._exchange(connection):
                    own.remove(connection)

    def _exchange(self, connection: socket.socket) -> bool:
        head = connection.recv(_LENGTH.size, socket.MSG_WAITALL)
        if len(head) < _LENGTH.size:
            return False
        payload = connection.recv(_LENGTH.unpack(head)[0], socket.MSG_WAITALL)
        response, fd = self._service.side_answer(side_pb2.SideRequest.FromString(payload))
        data = response.SerializeToString()
        with contextlib.suppress(BrokenPipeError):  # ended meanwhile
            socket.send_fds(connection, [_LENGTH.pack(len(data)) + data], [] if fd is None else [fd])
        return True


def _readable(sockets: list[socket.socket]) -> list[socket.socket]:
    found, _, _ = select.select(sockets, [], [], DEADLINE_S)
    return list(found)


def _nothing() -> None:
    pass


def _refused(reason: str, **metadata: str) -> side_pb2.SideResponse:
    number = errors_pb2.ErrorReason.Value(f"ERROR_REASON_{reason}")
    return side_pb2.SideResponse(refused=side_pb2.Refused(reason=number, message=reason, metadata=metadata))


def _item(reason: str, code: int) -> types_pb2.ItemStatus:
    return types_pb2.ItemStatus(
        code=code, reason=errors_pb2.ErrorReason.Value(f"ERROR_REASON_{reason}"), message=reason
    )


def _abort(context: grpc.ServicerContext, code: grpc.StatusCode, reason: str) -> None:
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(domain="kvharbor", reason=reason))
    context.abort_with_status(
        rpc_status.to_status(status_pb2.Status(code=code.value[0], message=reason, details=[detail]))
    )
