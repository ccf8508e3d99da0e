"""What the first frame of a side socket asks for: a session, a place in one, or to go on with one."""

import socket
from dataclasses import dataclass
from typing import Final

from kvharbor.pool.errors import InvalidField
from kvharbor.server.errors import StaleEpoch
from kvharbor.server.messages.engines import check_engine, engine_of
from kvharbor.server.session_errors import SessionRequired
from kvharbor.server.sessions.members import LEADER_RANK, Member, Mode
from kvharbor.server.sessions.peer import Peer
from kvharbor.server.sessions.session import Session
from kvharbor.server.sessions.sessions import Sessions
from kvharbor.server.sessions.warm_notices import WarmNotices
from kvharbor.v1 import side_pb2

API_VERSION: Final = "v1"
MAX_RANK: Final = 65_535

_MODES = {
    side_pb2.MEMBER_MODE_UNSPECIFIED: Mode.READ_WRITE,
    side_pb2.MEMBER_MODE_READ_WRITE: Mode.READ_WRITE,
    side_pb2.MEMBER_MODE_READ_ONLY: Mode.READ_ONLY,
}


@dataclass(frozen=True, slots=True)
class Caller:
    """A connected process: who it is, the proof of it, and its socket."""

    peer: Peer
    pidfd: int
    connection: socket.socket


def checked_hello(request: side_pb2.SideRequest) -> side_pb2.Hello:
    """Returns the hello that a first frame has to be."""
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
    check_engine(hello.engine)
    if hello.HasField("join") and hello.HasField("resume"):
        raise InvalidField(
            field="resume", value="set beside join", limit="at most one of the two", remedy="leave one out"
        )
    return hello


def require_epoch(hello: side_pb2.Hello, epoch: str) -> None:
    """Raises StaleEpoch for a hello that would go on with a session of another epoch."""
    if hello.HasField("resume") and hello.resume.epoch != epoch:
        raise StaleEpoch(
            hello.resume.epoch[:80],
            current_epoch=epoch,
            what="the session",
            remedy="end all work on its memory, map that no more, then say hello without `resume`",
        )


def welcomed(
    sessions: Sessions, hello: side_pb2.Hello, caller: Caller, epoch: str
) -> tuple[Session, Member, side_pb2.Welcome]:
    """Gives the caller what it asks for; raises SessionUnknown, RankTaken, PeerUnproven, InvalidField.

    `epoch` is the service's, and that of a hello that resumes (`require_epoch`).
    """
    if hello.HasField("join"):
        session, member = _joined(sessions, hello.join, caller)
    elif hello.HasField("resume"):
        session, member = sessions.resume(hello.resume.token, caller.peer, caller.pidfd, caller.connection)
    else:
        session, member = sessions.begin(
            caller.peer,
            caller.pidfd,
            caller.connection,
            client_name=hello.client_name,
            client_version=hello.client_version,
            engine=engine_of(hello, caller.peer.pid),
        )
    welcome = side_pb2.Welcome(session_id=str(session.number), epoch=epoch, tenant=session.peer.tenant)
    if hello.HasField("join") or hello.HasField("resume"):
        welcome.opened_pool_ids.extend(session.opened)
    if member.rank == LEADER_RANK:
        welcome.session_token, welcome.join_token = session.token, session.join_token
        session.warm_notices = WarmNotices() if hello.accepts_warm_tasks else None
        for opened in session.opened.values():
            # What an older socket was told may never have been read.
            opened.served.warm.welcome(session)
    else:
        welcome.member_token = member.token
    return session, member, welcome


def _joined(sessions: Sessions, join: side_pb2.Join, caller: Caller) -> tuple[Session, Member]:
    if not LEADER_RANK < join.rank <= MAX_RANK:
        raise InvalidField(
            field="join.rank",
            value=join.rank,
            limit=f"1 to {MAX_RANK}",
            remedy="the leader, who says hello without `join`, has rank 0",
        )
    if join.mode not in _MODES:
        raise InvalidField(
            field="join.mode", value=join.mode, limit="a value of MemberMode", remedy="set it, or update the service"
        )
    return sessions.join(
        join.join_token, caller.peer, caller.pidfd, caller.connection, rank=join.rank, mode=_MODES[join.mode]
    )
