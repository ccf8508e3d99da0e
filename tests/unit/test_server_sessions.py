"""Sessions as they are kept: what a later process takes up, and what it must not."""

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import NoReturn, cast

import pytest

from kvharbor.pool.engines import UNNAMED, Engine
from kvharbor.server.pools.served_pool import OpenedPool
from kvharbor.server.session_errors import PeerUnproven, RankTaken, SessionNotFound, SessionUnknown
from kvharbor.server.sessions.ended import MAX_TOKENS, EndedSessions
from kvharbor.server.sessions.members import Member, Mode
from kvharbor.server.sessions.numbers import MAX_NUMBER, SessionNumbers
from kvharbor.server.sessions.peer import Peer
from kvharbor.server.sessions.session import Session, State
from kvharbor.server.sessions.sessions import Sessions
from kvharbor.server.supervision.keeper import Keeper, Unkept

OWN = Peer(os.getpid(), os.getuid(), "t", administrator=False)


def crash(failure: BaseException) -> NoReturn:
    raise AssertionError("the process would end") from failure


async def nothing_to_end(_: Session, __: OpenedPool) -> int:
    return 0


def registry(keeper: Keeper) -> Sessions:
    return Sessions(keeper, nothing_to_end, crash)


class Site:
    """Sockets to be had, and pidfds of this process."""

    def __init__(self) -> None:
        self.keeper = Unkept()
        self.pidfd = os.pidfd_open(os.getpid())
        self._sockets: list[socket.socket] = []

    def connection(self) -> socket.socket:
        """Returns the service's end of a connection."""
        ends = socket.socketpair()
        self._sockets += ends
        ends[0].setblocking(False)
        return ends[0]

    def begin(self, sessions: Sessions, peer: Peer = OWN) -> tuple[Session, Member]:
        """Begins a session."""
        return sessions.begin(
            peer, self.pidfd, self.connection(), client_name="n", client_version="v", engine=Engine("e", "1", "i")
        )

    def close(self) -> None:
        """Closes what is left."""
        for each in self._sockets:
            each.close()
        self.keeper.close()
        os.close(self.pidfd)


@contextlib.contextmanager
def made() -> Iterator[Site]:
    site = Site()
    try:
        yield site
    finally:
        site.close()


def run(scenario: Callable[[Site], Awaitable[None]]) -> None:
    async def limited(site: Site) -> None:
        await asyncio.wait_for(scenario(site), 10)

    with made() as site:
        asyncio.run(limited(site))


def test_a_later_process_knows_a_session_by_all_that_it_had() -> None:
    """It resumes by its token, as the process that it was; a member by its own."""

    async def scenario(site: Site) -> None:
        before = registry(site.keeper)
        session, _ = site.begin(before)
        _, member = before.join(session.join_token, OWN, site.pidfd, site.connection(), rank=7, mode=Mode.READ_ONLY)
        before.stop()
        after = registry(site.keeper)
        after.restore()
        (known,) = after.all()
        assert (known.number, known.token, known.join_token, known.state) == (
            session.number,
            session.token,
            session.join_token,
            State.RESUMING,
        )
        assert (known.peer, known.client_name, known.client_version) == (OWN, "n", "v")
        assert known.engine == Engine("e", "1", "i")
        assert known.began_at == session.began_at
        assert [(each.rank, each.mode, each.token) for each in known.members] == [
            (0, Mode.READ_WRITE, session.token),
            (7, Mode.READ_ONLY, member.token),
        ]
        assert after.member_count == 0
        sockets = [connection for _, _, connection in after.watch_restored()]
        assert len(sockets) == 2
        assert after.resume(member.token, OWN, site.pidfd, site.connection())[1].rank == 7
        assert known.state is State.RESUMING
        after.resume(session.token, OWN, site.pidfd, site.connection())
        assert (known.state, after.member_count) == (State.LIVE, 2)
        after.stop()
        for each in sockets:
            each.close()

    run(scenario)


def test_a_session_that_an_older_version_has_kept_has_no_engine() -> None:
    """It goes on all the same."""

    async def scenario(site: Site) -> None:
        before = registry(site.keeper)
        site.begin(before)
        before.stop()
        meta = site.keeper.kept["session/1"].meta
        del meta["engine"]
        after = registry(site.keeper)
        after.restore()
        (known,) = after.all()
        assert known.engine == UNNAMED
        after.stop()
        for member in known.members:
            for each in member.sockets:
                each.close()

    run(scenario)


def test_a_lost_session_stays_lost_over_processes() -> None:
    """It has not resumed, and cannot; a closed one is over at once."""

    async def scenario(site: Site) -> None:
        never = asyncio.Event()

        async def held_up(_: Session, __: OpenedPool) -> int:
            await never.wait()
            return 0

        before = Sessions(site.keeper, held_up, crash)
        (lost, _), (closed, _) = site.begin(before), site.begin(before)
        for session in (lost, closed):
            session.opened["p"] = cast(OpenedPool, None)  # nothing looks at it here
        before.lose(lost, "side socket ended")
        closing = asyncio.create_task(before.close(closed.token))
        await asyncio.sleep(0)
        before.stop()
        closing.cancel()
        after = Sessions(site.keeper, held_up, crash)
        after.restore()
        for session in after.all():
            session.opened["p"] = cast(OpenedPool, None)  # nothing looks at it here
        sockets = after.watch_restored()
        assert [(each.state, each.cause, each.closed) for each in after.all()] == [
            (State.ENDING, "side socket ended", False),
            (State.ENDING, "closed by the client", True),
        ]
        assert [each.members[0].gone.is_set() for each in after.all()] == [False, True]
        with pytest.raises(SessionUnknown, match="side socket ended"):
            after.resume(lost.token, OWN, site.pidfd, site.connection())
        after.stop()
        for _, _, each in sockets:
            each.close()

    run(scenario)


def test_members_of_a_session_that_was_not_kept_are_dropped() -> None:
    """The process before ended between the two: nobody was told of the session."""

    async def scenario(site: Site) -> None:
        before = registry(site.keeper)
        session, _ = site.begin(before)
        before.stop()
        site.keeper.drop(f"session/{session.number}")
        after = registry(site.keeper)
        after.restore()
        assert after.all() == []
        assert [name for name in site.keeper.kept if name.startswith("member/")] == []

    run(scenario)


def test_nothing_is_kept_of_a_session_that_is_over() -> None:
    """Nor are descriptors of it open."""

    async def scenario(site: Site) -> None:
        sessions = registry(site.keeper)
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names only
        session, member = site.begin(sessions)
        assert await sessions.close(session.token) == 0
        for connection in member.sockets:
            connection.close()
        assert [name for name in site.keeper.kept if name.startswith(("session/", "member/"))] == []
        assert len(os.listdir("/proc/self/fd")) == before + 1  # noqa: PTH208 - the client's end
        with pytest.raises(SessionUnknown):
            sessions.of(session.token)
        with pytest.raises(SessionNotFound):
            sessions.named(str(session.number))
        sessions.stop()

    run(scenario)


def test_who_has_a_token_is_told_why_the_session_ended() -> None:
    """Each of its processes, by the member that has gone; nobody else is told that there was a session."""

    async def scenario(site: Site) -> None:
        sessions = registry(site.keeper)
        session, _ = site.begin(sessions)
        connection = site.connection()
        _, member = sessions.join(session.join_token, OWN, site.pidfd, connection, rank=1, mode=Mode.READ_WRITE)
        sessions.socket_ended(session, member, connection)
        cause = f"the member of rank 1 (pid {OWN.pid}) has gone: side socket ended"
        for _ in ("ending", "ended"):
            with pytest.raises(SessionUnknown) as told:
                sessions.of(session.token)
            assert told.value.metadata() == {"cause": cause}
            assert str(told.value) == f"the session has ended ({cause}): connect again"
            for token in (session.token, member.token):
                with pytest.raises(SessionUnknown) as told:
                    sessions.resume(token, OWN, site.pidfd, site.connection())
                assert told.value.metadata() == {"cause": cause}
            assert session.ending is not None
            await session.ending
        for token in (session.join_token, str(session.number), ""):
            with pytest.raises(SessionUnknown) as told:
                sessions.of(token)
            assert told.value.metadata() == {}

    run(scenario)


def test_only_the_causes_of_the_last_sessions_are_remembered() -> None:
    """As many as there is room for, in order of their ends."""

    ended = EndedSessions()
    for number in range(MAX_TOKENS + 1):
        leader = Member(0, Mode.READ_WRITE, OWN, f"token {number}", -1, [])
        ended.add(Session(number, leader.token, OWN, "n", "v", members=[leader], cause=f"cause {number}"))
    told = [ended.unknown(f"token {number}").cause for number in (0, 1, MAX_TOKENS)]
    assert told == ["", "cause 1", f"cause {MAX_TOKENS}"]


def test_only_a_process_of_the_same_tenant_joins() -> None:
    """Whatever token it has: existence is information [S7]."""

    async def scenario(site: Site) -> None:
        sessions = registry(site.keeper)
        session, _ = site.begin(sessions)
        stranger = Peer(1, 1, "u", administrator=True)
        with pytest.raises(SessionUnknown):
            sessions.join(session.join_token, stranger, site.pidfd, site.connection(), rank=1, mode=Mode.READ_WRITE)
        sessions.join(session.join_token, OWN, site.pidfd, site.connection(), rank=1, mode=Mode.READ_WRITE)
        with pytest.raises(RankTaken):
            sessions.join(session.join_token, OWN, site.pidfd, site.connection(), rank=1, mode=Mode.READ_WRITE)
        sessions.stop()

    run(scenario)


def test_a_session_that_cannot_be_made_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where descriptors are out, each further hello would otherwise leave a session without a process."""

    def none_left(_: int) -> int:
        raise OSError(errno.EMFILE, "none left")

    async def scenario(site: Site) -> None:
        sessions = registry(site.keeper)
        with monkeypatch.context() as patched:
            patched.setattr(os, "dup", none_left)
            with pytest.raises(OSError, match="none left"):
                site.begin(sessions)
        assert sessions.all() == []
        site.begin(sessions)
        sessions.stop()

    run(scenario)


def test_another_process_does_not_resume() -> None:
    """The token alone proves nothing."""

    async def scenario(site: Site) -> None:
        sessions = registry(site.keeper)
        session, _ = site.begin(sessions)
        parent = os.pidfd_open(os.getppid())
        with pytest.raises(PeerUnproven):
            sessions.resume(session.token, Peer(os.getppid(), 0, "t", False), parent, site.connection())
        os.close(parent)
        sessions.stop()

    run(scenario)


def test_numbers_go_on_where_a_process_may_have_been() -> None:
    """None is given out twice; at the end of the range they begin anew, past those in use."""
    keeper = Unkept()
    numbers = SessionNumbers(keeper)
    first = [numbers.take(()) for _ in range(300)]
    second = [SessionNumbers(keeper).take(()) for _ in range(3)]
    assert first == list(range(1, 301))
    assert 300 < second[0] < second[1] < second[2]
    keeper.keep("sessions", {"next_number": MAX_NUMBER})
    last = SessionNumbers(keeper)
    assert [last.take({1, 2}), last.take({1, 2})] == [MAX_NUMBER, 3]
