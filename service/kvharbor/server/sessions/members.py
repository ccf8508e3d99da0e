"""The processes of a session, and when each is lost, and when it is proved gone."""

import asyncio
import enum
import math
import signal
import socket
from dataclasses import dataclass, field
from typing import Final

import structlog

from kvharbor.server.sessions.peer import Peer

log = structlog.get_logger(__name__)

LEADER_RANK: Final = 0
MAX_SOCKETS: Final = 32
"""Side sockets of one member at a time: all of them are kept, in one message."""


class Mode(enum.Enum):
    """What a member may do with blocks."""

    READ_WRITE = "rw"
    READ_ONLY = "ro"


@dataclass(slots=True, eq=False)
class Member:
    """One process of a session. `token` is the secret by which it resumes.

    `sockets` are its side sockets that are open in some process, the newest last; the tasks that read them close
    them. `pidfd` belongs to the member. `gone` is set once nothing of it can touch a block any more, at `gone_at` by
    the event loop's clock; minus infinity where the session has asserted it. `is_awaited`: it has been with the process
    before this one, and has not come back yet.
    """

    rank: int
    mode: Mode
    peer: Peer
    token: str
    pidfd: int
    sockets: list[socket.socket] = field(default_factory=list)
    exited: bool = False
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    gone_at: float = -math.inf
    is_awaited: bool = False

    def is_quiet(self) -> bool:
        """Tells whether every copy of its sockets is closed and the process has exited [S24].

        One without the other proves nothing: a forked child writes on after its parent's exit, and a process may
        close its socket and read on.
        """
        return self.exited and not self.sockets

    def fds(self) -> tuple[int, ...]:
        """Returns what a later process needs to go on watching it."""
        return (self.pidfd, *(connection.fileno() for connection in self.sockets))


def kill(member: Member) -> bool:
    """Sends SIGKILL to the process, through its pidfd and so to no other; False if it could not be sent."""
    try:
        signal.pidfd_send_signal(member.pidfd, signal.SIGKILL)
    except ProcessLookupError:
        return False
    except OSError as failure:
        # Another user's, for a service that is not root, or one in a PID namespace beside the service's own.
        log.warning("cannot kill", pid=member.peer.pid, rank=member.rank, error=failure.strerror)
        return False
    return True
