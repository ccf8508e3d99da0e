"""The side socket: a worker holds it for life. It opens the session, hands out memory, and its end is the end."""

import asyncio
import contextlib
import errno
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from kvharbor.pool.errors import InvalidField
from kvharbor.server.errors import ServerError, SessionRequired
from kvharbor.server.frames import Frames, StreamEnded
from kvharbor.server.sessions import Peer, Session, Sessions
from kvharbor.server.status import REFUSALS, Refusal, metadata_of, reason_of
from kvharbor.server.warm_notices import WarmNotices
from kvharbor.v1 import side_pb2, types_pb2

log = structlog.get_logger(__name__)

API_VERSION: Final = "v1"
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Attachment:
    """A pool's memory as it is handed to a worker. The descriptor is a copy, to be closed once it is sent.

    A worker that does not read makes it wait, and the pool may be dropped meanwhile: its own number would by then
    be another file's.
    """

    descriptor: types_pb2.PoolDescriptor
    fd: int


@dataclass(frozen=True, slots=True)
class SideRules:
    """What the side socket asks of the service around it."""

    epoch: str
    server_version: str
    hello_timeout_s: float
    max_sessions: int
    identify: Callable[[int, int], Peer]
    attach: Callable[[Session, str], Attachment]
    refusal: Callable[[], ServerError | None]
    crash: Callable[[BaseException], None]


class SideServer:
    """Serves the side socket until `close`. One task a connection, each awaiting its next frame."""

    def __init__(self, listener: socket.socket, sessions: Sessions, rules: SideRules) -> None:
        self._listener = listener
        self._sessions = sessions
        self._rules = rules
        self._connections: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to accept connections."""
        self._listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept())
        self._accepting.add_done_callback(self._stopped)

    async def close(self) -> None:
        """Closes the listener and every connection, and with them their sessions."""
        tasks = [*self._connections]
        if self._accepting is not None:
            tasks.append(self._accepting)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as failure:
                if failure.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ECONNABORTED):
                    raise
                # The listener stays readable, so without a pause this would spin until a descriptor is free.
                log.error("side socket cannot accept", error=failure.strerror)
                await asyncio.sleep(0.1)
                continue
            if len(self._connections) >= self._rules.max_sessions:
                log.warning("side socket refused", limit=self._rules.max_sessions, remedy="raise max_sessions")
                connection.close()
                continue
            connection.setblocking(False)
            task = asyncio.create_task(self._serve(connection))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)
            task.add_done_callback(self._stopped)

    def _stopped(self, task: asyncio.Task[None]) -> None:
        """Ends the process for an error that nobody expected: a session that does not end holds blocks for ever."""
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._rules.crash(failure)

    async def _serve(self, connection: socket.socket) -> None:
        with connection:
            session = None
            cause = "side socket ended"
            frames = Frames(connection)
            try:
                session = await self._hello(connection, frames)
                if session is not None:
                    session.close_side_socket = lambda: _shut(connection)
                    await self._talk(frames, session)
            except StreamEnded as ended:
                cause = str(ended) or cause
            except OSError as failure:
                cause = f"side socket failed: {failure.strerror}"
            finally:
                if session is not None:
                    await self._sessions.end(session, cause=cause)

    async def _hello(self, connection: socket.socket, frames: Frames) -> Session | None:
        """Answers the first frame; None when it was refused."""
        pid, uid, _ = _CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        try:
            async with asyncio.timeout(self._rules.hello_timeout_s):
                request = await frames.receive()
        except TimeoutError:
            log.warning("side socket without hello", pid=pid, uid=uid, waited_s=self._rules.hello_timeout_s)
            return None
        try:
            refusal = self._rules.refusal()
            if refusal is not None:
                raise refusal
            hello = _checked_hello(request)
        except REFUSALS as refused:
            await frames.send(_refused(refused))
            return None
        peer = self._rules.identify(pid, uid)
        session = self._sessions.begin(
            peer,
            client_name=hello.client_name,
            client_version=hello.client_version,
            warm_notices=WarmNotices() if hello.accepts_warm_tasks else None,
        )
        welcome = side_pb2.Welcome(
            session_id=str(session.number),
            session_token=session.token,
            epoch=self._rules.epoch,
            tenant=peer.tenant,
            api_version=API_VERSION,
            server_version=self._rules.server_version,
        )
        try:
            await frames.send(side_pb2.SideResponse(welcome=welcome))
        except OSError:
            await self._sessions.end(session, cause="side socket ended before the welcome")
            return None
        return session

    async def _talk(self, frames: Frames, session: Session) -> None:
        if session.warm_notices is None:
            await self._requests(frames, session)
            return
        notifying = asyncio.create_task(_notify(frames, session.warm_notices))
        notifying.add_done_callback(self._stopped)
        try:
            await self._requests(frames, session)
        finally:
            notifying.cancel()

    async def _requests(self, frames: Frames, session: Session) -> None:
        while True:
            request = await frames.receive()
            try:
                if request.WhichOneof("request") != "attach":
                    raise InvalidField(
                        field="request",
                        value=request.WhichOneof("request") or "empty",
                        limit="attach after the first hello",
                        remedy="open another side socket for another session",
                    )
                attachment = self._rules.attach(session, request.attach.pool_id)
            except REFUSALS as refused:
                await frames.send(_refused(refused))
                continue
            attached = side_pb2.Attached(descriptor=attachment.descriptor)
            try:
                await frames.send(side_pb2.SideResponse(attached=attached), fds=(attachment.fd,))
            finally:
                os.close(attachment.fd)


async def _notify(frames: Frames, notices: WarmNotices) -> None:
    with contextlib.suppress(OSError):  # whoever reads from the socket sees its end
        while True:
            pending = side_pb2.WarmTasksPending(pool_id=await notices.next())
            await frames.send(side_pb2.SideResponse(warm_tasks_pending=pending))


def _checked_hello(request: side_pb2.SideRequest) -> side_pb2.Hello:
    if request.WhichOneof("request") != "hello":
        raise SessionRequired
    hello = request.hello
    if API_VERSION not in hello.api_versions:
        raise InvalidField(
            field="api_versions",
            value=", ".join(hello.api_versions)[:80] or "empty",
            limit=f"a list with {API_VERSION}",
            remedy="use a client of that API version",
        )
    for name in ("client_name", "client_version"):
        length = len(getattr(hello, name).encode())
        if length > 128:
            raise InvalidField(field=name, value=f"{length} bytes long", limit="at most 128 bytes", remedy="shorten it")
    return hello


def _refused(refusal: Refusal) -> side_pb2.SideResponse:
    refused = side_pb2.Refused(reason=reason_of(refusal), message=str(refusal)[:512], metadata=metadata_of(refusal))
    return side_pb2.SideResponse(refused=refused)


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other side may have closed it already
        connection.shutdown(socket.SHUT_RDWR)
