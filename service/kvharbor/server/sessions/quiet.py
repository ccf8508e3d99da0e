"""Watches the processes of sessions: the end of a socket, the exit of a process, and the proof by both [S24]."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Collection

import structlog

from kvharbor.server.sessions.members import LEADER_RANK, Member
from kvharbor.server.sessions.session import Session

log = structlog.get_logger(__name__)

_PIECE_BYTES = 64 * 1024


class QuietWatch:
    """Calls `lost(session, cause)` whenever a member is seen to be lost, and sets `gone` of one that is quiet.

    Silence is never death: nothing here has a deadline.
    """

    def __init__(self, lost: Callable[[Session, str], None]) -> None:
        self._lost = lost

    def begin(self, session: Session, member: Member) -> None:
        """Watches for the member's exit, until `end`."""
        asyncio.get_running_loop().add_reader(member.pidfd, self._exited, session, member)

    def end(self, member: Member) -> None:
        """Watches it no longer."""
        asyncio.get_running_loop().remove_reader(member.pidfd)

    def socket_ended(self, session: Session, member: Member, connection: socket.socket) -> None:
        """No process has the other end of this socket any more. Only the newest one is the session's life."""
        is_newest = connection is member.sockets[-1]
        member.sockets.remove(connection)
        if is_newest:
            self._lose(session, member, "side socket ended")
        _consider(member)

    def _exited(self, session: Session, member: Member) -> None:
        self.end(member)
        member.exited = True
        self._lose(session, member, "process exited")
        _consider(member)

    def _lose(self, session: Session, member: Member, cause: str) -> None:
        if not session.ended:
            log.info("member lost", session=session.number, rank=member.rank, pid=member.peer.pid, cause=cause)
        self._lost(session, cause if member.rank == LEADER_RANK else f"{_named(member)} has gone: {cause}")


def _named(member: Member) -> str:
    # Without a pid where it is in another PID namespace.
    pid = f" (pid {member.peer.pid})" if member.peer.pid else ""
    return f"the member of rank {member.rank}{pid}"


def _consider(member: Member) -> None:
    if member.is_quiet() and not member.gone.is_set():
        member.gone_at = asyncio.get_running_loop().time()
        member.gone.set()


async def until_end(connection: socket.socket) -> None:
    """Reads what still comes, and returns when every copy of the other end is closed."""
    loop = asyncio.get_running_loop()
    # A reset is the end of one that had not read everything.
    with contextlib.suppress(ConnectionResetError):
        while await loop.sock_recv(connection, _PIECE_BYTES):
            pass


async def until_gone(members: Collection[Member], grace_s: float) -> None:
    """Waits until the members are gone, and then as long as their devices may go on without them."""
    for member in members:
        await member.gone.wait()
    left_s = max(member.gone_at for member in members) + grace_s - asyncio.get_running_loop().time()
    if grace_s and left_s > 0:
        await asyncio.sleep(left_s)
