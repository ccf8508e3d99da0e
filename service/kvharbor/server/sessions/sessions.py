"""Who is connected: every session from its hello until nothing is left of its processes."""

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import structlog

from kvharbor.pool.engines import UNNAMED, Engine
from kvharbor.pool.errors import InvalidField
from kvharbor.server.session_errors import PeerUnproven, RankTaken, SessionNotFound, SessionUnknown
from kvharbor.server.sessions.ended import EndedSessions
from kvharbor.server.sessions.kept import drop_session, keep_member, keep_session, restored_sessions
from kvharbor.server.sessions.members import LEADER_RANK, MAX_SOCKETS, Member, Mode
from kvharbor.server.sessions.numbers import SessionNumbers
from kvharbor.server.sessions.peer import Peer, is_same_process
from kvharbor.server.sessions.quiet import QuietWatch
from kvharbor.server.sessions.session import Session, State
from kvharbor.server.supervision.keeper import Keeper

if TYPE_CHECKING:
    from kvharbor.server.pools.served_pool import OpenedPool

log = structlog.get_logger(__name__)


class Sessions:
    """All sessions. Each is kept before anybody is told of it, and dropped when nothing is left of it [S15].

    `end_in_pool` takes an ended session out of a pool and returns how many sequences that released.
    """

    def __init__(
        self,
        keeper: Keeper,
        end_in_pool: "Callable[[Session, OpenedPool], Awaitable[int]]",
        crash: Callable[[BaseException], None],
    ) -> None:
        self._keeper = keeper
        self._end_in_pool = end_in_pool
        self._crash = crash
        self._numbers = SessionNumbers(keeper)
        self._by_number: dict[int, Session] = {}
        self._by_token: dict[str, Session] = {}
        self._ended_sessions = EndedSessions()
        self._quiet = QuietWatch(self.lose)

    def __len__(self) -> int:
        """Sessions that have not ended."""
        return sum(1 for session in self._by_number.values() if not session.ended)

    @property
    def member_count(self) -> int:
        """Processes of all sessions. Those still to resume do not count: they come back as connections."""
        return sum(not member.is_awaited for each in self._by_number.values() for member in each.members)

    def all(self) -> list[Session]:
        """Returns every session, the ended ones too of which something is left, in order of number."""
        return [self._by_number[number] for number in sorted(self._by_number)]

    def of(self, token: str) -> Session:
        """Returns the session of a token, or raises SessionUnknown if it has ended."""
        session = self._by_token.get(token)
        if session is None:
            raise self._ended_sessions.unknown(token)
        if session.ended:
            raise SessionUnknown(session.cause)
        return session

    def named(self, session_id: str) -> Session:
        """Returns a session by its name in lists, or raises SessionNotFound."""
        session = next((each for each in self._by_number.values() if str(each.number) == session_id), None)
        if session is None:
            raise SessionNotFound(session_id[:80])
        return session

    def begin(
        self,
        peer: Peer,
        pidfd: int,
        connection: socket.socket,
        *,
        client_name: str,
        client_version: str,
        engine: Engine = UNNAMED,
    ) -> tuple[Session, Member]:
        """Makes a session with the process that has said hello as its leader, and duplicates its pidfd."""
        # First of all: it fails where descriptors are out, and then there is no session yet.
        own_pidfd = os.dup(pidfd)
        number = self._numbers.take(self._by_number)
        session = Session(number, _secret(), peer, client_name, client_version, join_token=_secret(), engine=engine)
        self._by_number[number] = self._by_token[session.token] = session
        leader = Member(LEADER_RANK, Mode.READ_WRITE, peer, session.token, own_pidfd, [connection])
        self._admit(session, leader)
        # After its leader: a session without one means nothing to a later process.
        keep_session(self._keeper, session)
        log.info(
            "session began",
            session=number,
            tenant=peer.tenant,
            pid=peer.pid,
            client=client_name,
            version=client_version,
            engine=" ".join(filter(None, (engine.name, engine.version, engine.instance))),
        )
        return session, leader

    def join(
        self, join_token: str, peer: Peer, pidfd: int, connection: socket.socket, *, rank: int, mode: Mode
    ) -> tuple[Session, Member]:
        """Adds a process to a session of its tenant, and duplicates its pidfd; raises SessionUnknown, RankTaken."""
        session = next((each for each in self._by_number.values() if each.join_token == join_token), None)
        if session is None or session.ended or session.peer.tenant != peer.tenant:
            raise SessionUnknown
        if any(member.rank == rank for member in session.members):
            raise RankTaken(rank)
        member = Member(rank, mode, peer, _secret(), os.dup(pidfd), [connection])
        self._admit(session, member)
        log.info("member joined", session=session.number, rank=rank, mode=mode.value, pid=peer.pid)
        return session, member

    def resume(self, token: str, peer: Peer, pidfd: int, connection: socket.socket) -> tuple[Session, Member]:
        """Gives a member its next side socket; raises SessionUnknown, InvalidField, PeerUnproven for any other process.

        Its older sockets prove its life too, until they end.
        """
        session, member = self._member_of(token)
        if not is_same_process((member.pidfd, member.peer.pid), (pidfd, peer.pid)):
            raise PeerUnproven(peer.pid, remedy="resume from the process that has the session, not from a fork of it")
        if len(member.sockets) >= MAX_SOCKETS:
            raise InvalidField(
                field="resume",
                value=f"on one more side socket than the {len(member.sockets)} that are open",
                limit=f"on one of at most {MAX_SOCKETS}",
                remedy="close the older ones, in forked processes too",
            )
        member.sockets.append(connection)
        member.is_awaited = False
        keep_member(self._keeper, session, member)
        if member.rank == LEADER_RANK:
            session.state = State.LIVE
        log.info("member resumed", session=session.number, rank=member.rank, pid=peer.pid)
        return session, member

    def keep(self, session: Session) -> None:
        """Keeps a session as it stands, after its pools have changed; not one that is over by now."""
        if session.number in self._by_number:
            keep_session(self._keeper, session)

    def socket_ended(self, session: Session, member: Member, connection: socket.socket) -> None:
        """No process has the other end of a member's socket any more."""
        self._quiet.socket_ended(session, member, connection)
        if member.sockets and session.number in self._by_number:
            # An older one, after a resume: the supervisor need not keep it either.
            keep_member(self._keeper, session, member)

    def lose(self, session: Session, cause: str) -> None:
        """Ends a session whose processes may live on: what it holds waits for the proof that they do not [S24]."""
        if not session.ended:
            session.state, session.cause = State.ENDING, cause
            keep_session(self._keeper, session)
            self._begin_end(session)

    async def close(self, token: str) -> int:
        """Ends a session that asserts that no process of it touches a block; returns the sequences released.

        A lost one, of which something is left, need not wait for more then. Raises SessionUnknown.
        """
        session = self._by_token.get(token)
        if session is None:
            raise SessionUnknown
        session.closed = True
        self.lose(session, "closed by the client")
        _take_for_gone(session)
        assert session.ending is not None
        return await asyncio.shield(session.ending)

    def restore(self) -> None:
        """Takes up the sessions that an earlier process has kept, each still to resume. Watches nobody yet."""
        for session in restored_sessions(self._keeper):
            self._by_number[session.number] = self._by_token[session.token] = session

    def watch_restored(self) -> list[tuple[Session, Member, socket.socket]]:
        """Begins to watch the restored sessions, once each has its pools; those that had ended go on ending.

        Returns their sockets: each is to be read to its end.
        """
        restored = self.all()
        for session in restored:
            for member in session.members:
                self._quiet.begin(session, member)
            if session.cause:
                session.state = State.ENDING
                self._begin_end(session)
        return [(each, member, one) for each in restored for member in each.members for one in member.sockets]

    def stop(self) -> None:
        """Watches nobody any more: this process ends, and what is kept is the next one's."""
        for session in self._by_number.values():
            if session.ending is not None:
                session.ending.cancel()
            self._let_go(session)

    def _member_of(self, token: str) -> tuple[Session, Member]:
        for session in self._by_number.values():
            for member in session.members:
                if member.token != token:
                    continue
                if session.ended:
                    raise SessionUnknown(session.cause)
                return session, member
        raise self._ended_sessions.unknown(token)

    def _admit(self, session: Session, member: Member) -> None:
        session.members.append(member)
        session.members.sort(key=lambda each: each.rank)
        keep_member(self._keeper, session, member)
        self._quiet.begin(session, member)

    def _begin_end(self, session: Session) -> None:
        if session.stream is not None:
            session.stream.end(SessionUnknown(session.cause))
        for connection in _sockets(session):
            # Our direction only: the other one still proves its life. Who reads there finds out that it is over.
            _shut(connection, socket.SHUT_WR)
        if session.closed:
            _take_for_gone(session)
        else:
            log.info("session lost", session=session.number, cause=session.cause)
        session.ending = asyncio.create_task(self._end(session))
        session.ending.add_done_callback(self._ended)

    async def _end(self, session: Session) -> int:
        counts = await asyncio.gather(*(self._end_in_pool(session, opened) for opened in session.opened.values()))
        session.opened.clear()
        del self._by_number[session.number], self._by_token[session.token]
        self._ended_sessions.add(session)
        drop_session(self._keeper, session)
        for connection in _sockets(session):
            _shut(connection, socket.SHUT_RDWR)
        self._let_go(session)
        log.info("session ended", session=session.number, cause=session.cause, released_sequence_count=sum(counts))
        return sum(counts)

    def _ended(self, ending: "asyncio.Task[int]") -> None:
        """Ends the process for an error that nobody expected: a session that does not end holds blocks for ever."""
        if not ending.cancelled() and (failure := ending.exception()) is not None:
            self._crash(failure)

    def _let_go(self, session: Session) -> None:
        for member in session.members:
            self._quiet.end(member)
            os.close(member.pidfd)


def _take_for_gone(session: Session) -> None:
    for member in session.members:
        member.gone.set()


def _sockets(session: Session) -> list[socket.socket]:
    return [connection for member in session.members for connection in member.sockets]


def _shut(connection: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):  # the other side may have closed it already
        connection.shutdown(how)


def _secret() -> str:
    return secrets.token_urlsafe(24)
