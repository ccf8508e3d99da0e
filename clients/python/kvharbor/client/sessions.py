"""The sessions of a service, as administrators see them."""

from dataclasses import dataclass
from typing import Literal

from kvharbor.client.engines import Engine, engine
from kvharbor.v1 import pool_service_pb2, side_pb2

SessionState = Literal["live", "resuming", "ending"]

_STATES: dict[int, SessionState] = {
    pool_service_pb2.SESSION_STATE_LIVE: "live",
    pool_service_pb2.SESSION_STATE_RESUMING: "resuming",
    pool_service_pb2.SESSION_STATE_ENDING: "ending",
}


@dataclass(frozen=True, slots=True)
class SessionMember:
    """One process of a session; rank 0 is the leader. It is gone when it is neither connected nor running.

    `pid` is 0 for a process that the service's PID namespace does not have.
    """

    rank: int
    read_only: bool
    pid: int
    connected: bool
    exited: bool


@dataclass(frozen=True, slots=True)
class SessionHolding:
    """What a session has in a pool; private blocks are those that are not committed."""

    pool_id: str
    sequence_count: int
    private_block_count: int


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """One engine: whose it is, how it stands, why it ended, its processes and what it holds.

    "resuming": the service's process was replaced, and it has not come back yet. "ending": it has ended, and what it
    holds waits for the proof that its processes are gone.
    """

    session_id: str
    tenant: str
    client_name: str
    client_version: str
    state: SessionState
    cause: str
    age_s: float
    members: tuple[SessionMember, ...]
    holdings: tuple[SessionHolding, ...]
    engine: Engine


def session_info(message: pool_service_pb2.SessionInfo) -> SessionInfo:
    """Reads one entry of a ListSessionsResponse."""
    return SessionInfo(
        session_id=message.session_id,
        tenant=message.tenant,
        client_name=message.client_name,
        client_version=message.client_version,
        # A newer service may tell finer ones; none of them is one that may call.
        state=_STATES.get(message.state, "ending"),
        cause=message.cause,
        age_s=message.age.seconds + message.age.nanos / 1e9,
        members=tuple(
            SessionMember(
                rank=member.rank,
                read_only=member.mode == side_pb2.MEMBER_MODE_READ_ONLY,
                pid=member.pid,
                connected=member.connected,
                exited=member.exited,
            )
            for member in message.members
        ),
        holdings=tuple(
            SessionHolding(each.pool_id, each.sequence_count, each.private_block_count) for each in message.holdings
        ),
        engine=engine(message.engine),
    )
