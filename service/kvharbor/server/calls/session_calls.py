"""Calls on sessions: CloseSession, ListSessions, KillSession."""

import re
import time

import structlog

from kvharbor.pool.errors import InvalidField
from kvharbor.server.calls.gate import Callers, Context, Gate, answered
from kvharbor.server.calls.pages import page_size_of
from kvharbor.server.messages.engines import engine_message
from kvharbor.server.messages.wire import duration_message
from kvharbor.server.pools.served_pool import ServedPool
from kvharbor.server.session_errors import SessionUnknown
from kvharbor.server.sessions.members import Member, Mode, kill
from kvharbor.server.sessions.session import Session, State
from kvharbor.server.sessions.sessions import Sessions
from kvharbor.v1 import pool_service_pb2 as pb
from kvharbor.v1 import pool_service_pb2_grpc as rpc
from kvharbor.v1 import side_pb2

log = structlog.get_logger(__name__)

_STATES = {
    State.LIVE: pb.SESSION_STATE_LIVE,
    State.RESUMING: pb.SESSION_STATE_RESUMING,
    State.ENDING: pb.SESSION_STATE_ENDING,
}
_MODES = {
    Mode.READ_WRITE: side_pb2.MEMBER_MODE_READ_WRITE,
    Mode.READ_ONLY: side_pb2.MEMBER_MODE_READ_ONLY,
}


class SessionCalls(rpc.PoolServiceServicer):
    """The calls of PoolService on sessions."""

    def __init__(self, gate: Gate, callers: Callers, sessions: Sessions) -> None:
        self.gate = gate
        self._callers = callers
        self._sessions = sessions

    @answered
    async def CloseSession(
        self,
        request: pb.CloseSessionRequest,  # noqa: ARG002 - the signature is gRPC's
        context: Context,
    ) -> pb.CloseSessionResponse:
        token = self._callers.token(context)
        try:
            released_count = await self._sessions.close(token)
        except SessionUnknown:
            # Closed before: the answer to that call may have been lost.
            released_count = 0
        return pb.CloseSessionResponse(released_sequence_count=released_count)

    @answered
    async def ListSessions(self, request: pb.ListSessionsRequest, context: Context) -> pb.ListSessionsResponse:
        self._callers.administrator(context)
        after = _page_start(request.page_token)
        page_size = page_size_of(request.page_size)
        rest = [session for session in self._sessions.all() if session.number > after]
        page = rest[:page_size]
        return pb.ListSessionsResponse(
            sessions=[_info(session) for session in page],
            next_page_token=str(page[-1].number) if len(rest) > page_size else "",
        )

    @answered
    async def KillSession(self, request: pb.KillSessionRequest, context: Context) -> pb.KillSessionResponse:
        killer = self._callers.administrator(context)
        session = self._sessions.named(request.session_id)
        killed_count = sum(kill(member) for member in session.members)
        log.warning("session killed", session=session.number, uid=killer.uid, killed_process_count=killed_count)
        return pb.KillSessionResponse(killed_process_count=killed_count)


def _page_start(token: str) -> int:
    if not re.fullmatch("[0-9]{0,8}", token):
        raise InvalidField(
            field="page_token",
            value=repr(token[:40]),
            limit="a next_page_token of this call",
            remedy="begin with an empty one",
        )
    return int(token or 0)


def _info(session: Session) -> pb.SessionInfo:
    return pb.SessionInfo(
        session_id=str(session.number),
        tenant=session.peer.tenant,
        client_name=session.client_name,
        client_version=session.client_version,
        state=_STATES[session.state],
        cause=session.cause,
        age=duration_message(time.monotonic() - session.began_at),
        members=[_member(member) for member in session.members],
        holdings=[_holding(session.number, opened.served) for opened in session.opened.values()],
        engine=engine_message(session.engine),
    )


def _member(member: Member) -> pb.SessionMember:
    return pb.SessionMember(
        rank=member.rank,
        mode=_MODES[member.mode],
        pid=member.peer.pid,
        connected=bool(member.sockets),
        exited=member.exited,
    )


def _holding(number: int, served: ServedPool) -> pb.SessionHolding:
    holding = served.pool.holding(number)
    return pb.SessionHolding(
        pool_id=served.pool_id,
        sequence_count=holding.sequence_count,
        private_block_count=holding.private_block_count,
    )
