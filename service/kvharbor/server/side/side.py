"""The side socket: a process holds it for life. It hands out memory, and its end is the end of the session."""

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import structlog

from kvharbor.pool.errors import InvalidField
from kvharbor.server.descriptors import needing_descriptors
from kvharbor.server.errors import DescriptorsExhausted, ServerError, StaleEpoch
from kvharbor.server.messages.status import REFUSALS, Refusal, metadata_of, reason_of
from kvharbor.server.session_errors import PeerUnproven, SessionUnknown
from kvharbor.server.sessions.members import LEADER_RANK, Member, Mode
from kvharbor.server.sessions.peer import Peer, boot_time, credentials, pidfd_of
from kvharbor.server.sessions.quiet import until_end
from kvharbor.server.sessions.session import Session
from kvharbor.server.sessions.sessions import Sessions
from kvharbor.server.sessions.warm_notices import WarmNotices
from kvharbor.server.side.attaching import Attachment
from kvharbor.server.side.frames import FrameInvalid, Frames, StreamEnded
from kvharbor.server.side.greeting import API_VERSION, Caller, checked_hello, require_epoch, welcomed
from kvharbor.v1 import side_pb2

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SideRules:
    """What the side socket asks of the service around it."""

    epoch: str
    server_version: str
    hello_timeout_s: float
    max_sessions: int
    identify: Callable[[int, int], Peer]
    attach: Callable[[Session, side_pb2.Attach, Mode], Attachment]
    attach_status: Callable[[Session, side_pb2.AttachStatus], Attachment]
    refusal: Callable[[], ServerError | None]
    crash: Callable[[BaseException], None]


class SideServer:
    """Serves the side socket until `close`. One task a connection reads it to its end, whatever is said on it."""

    def __init__(self, listener: socket.socket, sessions: Sessions, rules: SideRules) -> None:
        self._listener = listener
        self._sessions = sessions
        self._rules = rules
        self._tasks: set[asyncio.Task[None]] = set()
        self._greeting_count = 0
        self.stale_pids: set[int] = set()
        """Processes that have asked to go on in another epoch: they have, or had a moment ago, memory of that."""

    def start(self) -> None:
        """Begins to accept connections, and to watch the processes of restored sessions."""
        self._listener.setblocking(False)
        for session, member, connection in self._sessions.watch_restored():
            self._spawn(self._watch(session, member, connection))
        self._spawn(self._accept())

    async def close(self) -> None:
        """Closes the listener and this process's end of every connection. No session ends by that."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._listener.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._stopped)

    def _stopped(self, task: asyncio.Task[None]) -> None:
        """Ends the process for an error that nobody expected: a session that does not end holds blocks for ever."""
        self._tasks.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._rules.crash(failure)

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
            if self._greeting_count + self._sessions.member_count >= self._rules.max_sessions:
                log.warning("side socket refused", limit=self._rules.max_sessions, remedy="raise max_sessions")
                connection.close()
                continue
            connection.setblocking(False)
            self._greeting_count += 1
            self._spawn(self._serve(connection, boot_time()))

    async def _serve(self, connection: socket.socket, accepted_at: float) -> None:
        with connection:
            frames = Frames(connection)
            try:
                greeted = await self._greet(connection, frames, accepted_at)
            finally:
                self._greeting_count -= 1
            if greeted is None:
                return
            session, member, welcome = greeted
            try:
                await frames.send(side_pb2.SideResponse(welcome=welcome))
                await self._talk(frames, session, member)
            except FrameInvalid as invalid:
                self._sessions.lose(session, str(invalid))
            except (StreamEnded, OSError):
                pass  # its end is still to come, or has just come
            await self._watch(session, member, connection)

    async def _watch(self, session: Session, member: Member, connection: socket.socket) -> None:
        """Reads a member's socket to the end, answering nothing."""
        with connection:
            await until_end(connection)
            self._sessions.socket_ended(session, member, connection)

    async def _greet(
        self, connection: socket.socket, frames: Frames, accepted_at: float
    ) -> tuple[Session, Member, side_pb2.Welcome] | None:
        """Takes the first frame; None when it did not come or was refused."""
        pid, uid = credentials(connection)
        proof = _proof(connection, accepted_at)
        try:
            async with asyncio.timeout(self._rules.hello_timeout_s):
                request = await frames.receive()
            try:
                return self._welcomed(request, self._rules.identify(pid, uid), proof, connection)
            except REFUSALS as refused:
                await frames.send(_refused(refused))
        except TimeoutError:
            log.warning("side socket without hello", pid=pid, uid=uid, waited_s=self._rules.hello_timeout_s)
        except (StreamEnded, FrameInvalid, OSError):
            pass  # nobody to answer
        finally:
            if isinstance(proof, int):
                os.close(proof)
        return None

    def _welcomed(
        self,
        request: side_pb2.SideRequest,
        peer: Peer,
        proof: int | PeerUnproven | DescriptorsExhausted,
        connection: socket.socket,
    ) -> tuple[Session, Member, side_pb2.Welcome]:
        hello = checked_hello(request)
        # Before the service is ready, too: it may wait for the memory that whoever is told this lets go of [S31].
        try:
            require_epoch(hello, self._rules.epoch)
        except StaleEpoch:
            self.stale_pids.add(peer.pid)
            raise
        refusal = self._rules.refusal()
        if refusal is not None:
            raise refusal
        if not isinstance(proof, int):
            raise proof
        caller = Caller(peer, proof, connection)
        with needing_descriptors():
            session, member, welcome = welcomed(self._sessions, hello, caller, self._rules.epoch)
        welcome.api_version, welcome.server_version = API_VERSION, self._rules.server_version
        return session, member, welcome

    async def _talk(self, frames: Frames, session: Session, member: Member) -> None:
        if session.warm_notices is None or member.rank != LEADER_RANK:
            await self._requests(frames, session, member)
            return
        notifying = asyncio.create_task(_notify(frames, session.warm_notices))
        notifying.add_done_callback(self._stopped)
        try:
            await self._requests(frames, session, member)
        finally:
            notifying.cancel()

    async def _requests(self, frames: Frames, session: Session, member: Member) -> None:
        while True:
            request = await frames.receive()
            try:
                attachment = self._attached(request, session, member)
            except REFUSALS as refused:
                await frames.send(_refused(refused))
                continue
            try:
                await frames.send(attachment.message, fds=attachment.fds)
            finally:
                for fd in attachment.fds:
                    os.close(fd)

    def _attached(self, request: side_pb2.SideRequest, session: Session, member: Member) -> Attachment:
        asked = request.WhichOneof("request")
        if asked not in ("attach", "attach_status"):
            raise InvalidField(
                field="request",
                value=asked or "empty",
                limit="attach or attach_status after the first hello",
                remedy="open another side socket for another session",
            )
        if session.ended:
            raise SessionUnknown(session.cause)
        with needing_descriptors():
            if asked == "attach_status":
                return self._rules.attach_status(session, request.attach_status)
            return self._rules.attach(session, request.attach, member.mode)


async def _notify(frames: Frames, notices: WarmNotices) -> None:
    with contextlib.suppress(OSError):  # whoever reads from the socket sees its end
        while True:
            pending = side_pb2.WarmTasksPending(pool_id=await notices.next())
            await frames.send(side_pb2.SideResponse(warm_tasks_pending=pending))


def _proof(connection: socket.socket, accepted_at: float) -> int | PeerUnproven | DescriptorsExhausted:
    """Returns the pidfd of the process that connected, or why there is none: that is for the answer to its hello."""
    try:
        with needing_descriptors():
            return pidfd_of(connection, accepted_at=accepted_at)
    except (PeerUnproven, DescriptorsExhausted) as refused:
        return refused


def _refused(refusal: Refusal) -> side_pb2.SideResponse:
    refused = side_pb2.Refused(reason=reason_of(refusal), message=str(refusal)[:512], metadata=metadata_of(refusal))
    return side_pb2.SideResponse(refused=refused)
