"""A service in the test's own process whose "process" ends and comes back at exactly the moment a test wants.

It has what its client can see of a service: a side socket whose listener and accepted sockets outlive the process,
sequences that do not (`fake_calls`), and one pool of memory an epoch, in as many parts as its layout has.
"""

import contextlib
import queue
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc

from contract.leaks import mapped_arenas
from fake_calls import FakeSequences
from fake_process import DEADLINE_S as DEADLINE_S
from fake_process import Process, abort, refused
from fake_stream import FakeBlocks
from kvharbor.client import descriptors
from kvharbor.gpumem import Arena, ArenaKind, Descriptor, HostArena, Layout
from kvharbor.v1 import cache_service_pb2 as cache
from kvharbor.v1 import pool_service_pb2 as pools
from kvharbor.v1 import side_pb2, types_pb2

TOKEN = "leader"
JOIN_TOKEN = "join"
MEMBER_TOKEN = "member"
MakeArena = Callable[[int, str], Arena]


def host_arena(size_bytes: int, name: str) -> HostArena:
    """Makes one part of a pool in host memory."""
    return HostArena.create(size_bytes, name=name)


class FakeService:
    """One session's service. `calls` has every request that was answered or begun, by the method's name.

    `before` and `after` have what is run before a method takes effect, and before its reply leaves. `attaches` has
    what was asked for on side sockets. While `in_use` the pool is not dropped; while `starting` no session begins;
    while `refuse_stream` there is none. Made of arenas of another kind, it hands out their memory instead.
    """

    def __init__(self, folder: Path, layout: Layout, block_count: int, make_arena: MakeArena = host_arena) -> None:
        self.path = folder / "kv.sock"
        self.layout = layout
        self.descriptor: Descriptor = layout.descriptor(block_count)
        self.epoch = "e1"
        self.calls: dict[str, list[Any]] = defaultdict(list)
        self.attaches: list[side_pb2.Attach] = []
        self.before: dict[str, Callable[[], None]] = {}
        self.after: dict[str, Callable[[], None]] = {}
        self.hellos: queue.Queue[side_pb2.Hello] = queue.Queue()
        self.accepted: list[socket.socket] = []
        self.held = FakeSequences(layout)
        self.blocks = FakeBlocks(self.held, first_block=block_count // 2)
        self._changing = threading.RLock()
        self._forgetting = threading.Lock()
        self.opened = False
        self.in_use = False
        self.starting = False
        self.refuse_stream = False
        self._knows_session = True
        self._make_arena = make_arena
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.path.with_suffix(".side")))
        self._listener.listen()
        self.arenas = self._new_arenas()
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

    @property
    def sequences(self) -> dict[str, types_pb2.Sequence]:
        """What this process of the service knows, by id."""
        return self.held.known

    def mapped_epochs(self) -> set[str]:
        """The epochs whose memory is mapped in this process."""
        mark = f"kvharbor-{id(self):x}-"
        return {line.split(mark)[1].split()[0] for line in mapped_arenas() if mark in line}

    def memory(self, part: int = 0) -> bytes:
        """The bytes of a part in this epoch, as another process would see them."""
        return bytes(self._mappings[part].buffer)

    def begin(self) -> None:
        """Starts the process."""
        # Known before it serves: who is served by another one is told nothing.
        self._running = Process(self, self._listener)
        self._running.start()

    def kill(self) -> None:
        """Ends the process: calls break off, sequences are forgotten, and whoever holds a side socket sees its end."""
        with self._changing:
            self.break_off()
            self.blink()

    def break_off(self) -> None:
        """Ends what calls are made to; whether with the process, side sockets tell by `kill` or `restart`."""
        running, self._running = self._running, None
        if running is not None:
            running.end()

    def blink(self) -> None:
        """Forgets what a process forgets, while the calls under way are still answered: an answer that comes late."""
        with self._forgetting:
            self._knows_session = False
            self.held.known.clear()
            self.blocks.forget()
            self.held.resumed = False
            for connection in [*self.accepted]:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_WR)

    def restart(self) -> None:
        """Ends the process and starts the next one, which has all that is kept; threads may do so at the same time."""
        with self._changing:
            self.kill()
            self.begin()

    def new_epoch(self) -> None:
        """Ends the process and starts another service, which knows of nothing."""
        self.kill()
        for connection in self.accepted:
            connection.close()
        self.accepted.clear()
        self.epoch = f"e{int(self.epoch[1:]) + 1}"
        self.blocks.kept.clear()
        self._close_arenas()
        self.arenas = self._new_arenas()
        self.held.resumed, self.opened = True, False
        self.begin()

    def wait_until_resumed(self) -> cache.ResumeRequest:
        """Returns the next Resume that completes one."""
        return self.held.resumes.get(timeout=DEADLINE_S)

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
        self._close_arenas()

    def _new_arenas(self) -> list[Arena]:
        self.held.pool_id = self.pool_id
        name = f"kvharbor-{id(self):x}-{self.epoch}"
        arenas = [self._make_arena(self.descriptor.size_bytes, name) for _ in range(self.layout.tp_size)]
        self._mappings = [arena.map() for arena in arenas if isinstance(arena, HostArena)]
        return arenas

    def _close_arenas(self) -> None:
        for mapping in self._mappings:
            mapping.close()
        for arena in self.arenas:
            arena.close()

    # The side socket

    def side_answer(self, request: side_pb2.SideRequest) -> tuple[side_pb2.SideResponse, tuple[int, ...]]:
        """Answers one frame, with descriptors."""
        if request.WhichOneof("request") == "attach":
            return self._attached(request.attach)
        return self._welcomed(request.hello), ()

    def _attached(self, attach: side_pb2.Attach) -> tuple[side_pb2.SideResponse, tuple[int, ...]]:
        self.attaches.append(attach)
        if not self.opened:
            return refused("POOL_NOT_FOUND", poolId=attach.pool_id), ()
        if attach.part >= len(self.arenas):
            return refused("INVALID_FIELD", field="part"), ()
        export = self.arenas[attach.part].export()
        if export.device and export.device not in attach.device_view.visible_devices:
            return refused("DEVICE_NOT_VISIBLE", device=export.device), ()
        if export.device and attach.device_view.mps_client:
            return refused("MPS_CLIENT_REFUSED", device=export.device), ()
        attached = side_pb2.Attached(pool=self.description(), part=attach.part)
        if export.kind is not ArenaKind.HOST:
            attached.device_memory.CopyFrom(
                side_pb2.DeviceMemory(
                    device=export.device,
                    ipc_handle=export.ipc_handle,
                    offset_bytes=export.offset_bytes,
                    exporter_pid=export.exporter_pid,
                    chunk_bytes=export.chunk_bytes,
                )
            )
        return side_pb2.SideResponse(attached=attached), export.fds

    def _welcomed(self, hello: side_pb2.Hello) -> side_pb2.SideResponse:
        self.hellos.put(hello)
        if hello.HasField("resume") and hello.resume.epoch != self.epoch:
            return refused("STALE_EPOCH", epoch=hello.resume.epoch, currentEpoch=self.epoch)
        if self.starting:
            return refused("STARTING")
        if hello.HasField("resume") and hello.resume.token not in (TOKEN, MEMBER_TOKEN):
            return refused("SESSION_UNKNOWN")
        self._knows_session = True
        member = hello.HasField("join") or (hello.HasField("resume") and hello.resume.token == MEMBER_TOKEN)
        welcome = side_pb2.Welcome(
            session_id="7",
            session_token="" if member else TOKEN,
            member_token=MEMBER_TOKEN if member else "",
            join_token="" if member else JOIN_TOKEN,
            epoch=self.epoch,
            opened_pool_ids=[self.pool_id] if self.opened else [],
        )
        return side_pb2.SideResponse(welcome=welcome)

    def description(self) -> types_pb2.PoolDescriptor:
        """Describes the pool."""
        return types_pb2.PoolDescriptor(
            pool_id=self.pool_id,
            name="p",
            epoch=self.epoch,
            arena_kind=self.arenas[0].kind,
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
            parts=[types_pb2.PoolPart(device=arena.export().device) for arena in self.arenas],
        )

    # Calls

    def answer(self, method: str, request: Any, context: grpc.ServicerContext) -> Any:
        """Answers a call, unless the pool must be resumed first."""
        self.calls[method].append(request)
        process, broken_off = self._running, threading.Event()
        context.add_callback(broken_off.set)
        self.before.get(method, _nothing)()
        reply = self._answered(method, request, context)
        self.after.get(method, _nothing)()
        if self._running is not process:
            broken_off.wait(DEADLINE_S)
        return reply

    def _answered(self, method: str, request: Any, context: grpc.ServicerContext) -> Any:
        match method:
            case "OpenPool":
                self.opened = True
                return pools.OpenPoolResponse(pool=self.description())
            case "ListPools":
                return pools.ListPoolsResponse(pools=[self.description()])
            case "DropPool" if self.in_use:
                abort(context, grpc.StatusCode.FAILED_PRECONDITION, "POOL_IN_USE")
            case "DropPool":
                self.opened = False
                return pools.DropPoolResponse()
            case "CloseSession":
                return pools.CloseSessionResponse()
            case "GetServerInfo":
                return pools.GetServerInfoResponse(epoch=self.epoch)
        if method != "Resume" and request.pool_id != self.pool_id:
            abort(context, grpc.StatusCode.FAILED_PRECONDITION, "STALE_EPOCH")
        if not self.held.resumed and (method != "Resume" or not self._knows_session):
            with self._forgetting:
                pass  # a process that has forgotten is the next one: the end of the side sockets is seen by then
            abort(context, grpc.StatusCode.FAILED_PRECONDITION, "RESUME_REQUIRED")
        if method == "Handoff" and request.commit.sequence_id not in self.sequences:
            abort(context, grpc.StatusCode.NOT_FOUND, "SEQUENCE_NOT_FOUND")
        lost = self.blocks.resume(request) if method == "Resume" else None
        reply = self.held.answer(method, request)
        if lost is not None:
            reply.lost.CopyFrom(lost)
        return reply

    def converse(self, process: Process, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        """Serves the session's stream, once its pool is resumed."""
        if not self.held.resumed:
            abort(context, grpc.StatusCode.FAILED_PRECONDITION, "RESUME_REQUIRED")
        if self.refuse_stream:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such method")
        yield from self.blocks.converse(requests, lambda: self._running is not process)


def _nothing() -> None:
    pass
