"""Sessions of several processes: who may join, what each may do, and that they live and die together."""

import mmap
import os
from collections.abc import Iterator

import pytest

from kvharbor.v1 import cache_service_pb2 as cache
from kvharbor.v1 import errors_pb2, side_pb2
from kvharbor.v1 import pool_service_pb2 as pools
from raw_caller import BLOCK_BYTES, RawCaller, ask, greeted, hello, joining, refused
from service_process import ServiceProcess
from session_worker import SessionWorker
from waiting import until

RO = side_pb2.MEMBER_MODE_READ_ONLY
JOIN = (
    "side, answer = raw.greeted(path, raw.joining(join_token, rank, mode)); result = len(answer.welcome.member_token)"
)


def attach(pool_id: str) -> side_pb2.SideRequest:
    """Returns the request for a pool's memory."""
    return side_pb2.SideRequest(attach=side_pb2.Attach(pool_id=pool_id))


def sessions_of(caller: RawCaller) -> dict[str, pools.SessionInfo]:
    """Returns all sessions by id; the tests' user is an administrator."""
    response = caller.call(caller.pools.ListSessions, pools.ListSessionsRequest())
    return {session.session_id: session for session in response.sessions}


@pytest.fixture
def leader(harbor: str) -> Iterator[RawCaller]:
    """A session of the shared service."""
    with RawCaller(harbor) as caller:
        yield caller


def join_in(worker: SessionWorker, leader: RawCaller, rank: int, mode: int = 0) -> None:
    """Makes a worker process a member of the leader's session."""
    assert worker.run(JOIN, join_token=leader.welcome.join_token, rank=rank, mode=mode) >= 32


def test_a_member_maps_what_the_leader_has_opened_and_makes_no_calls(harbor: str, leader: RawCaller) -> None:
    """It gets no session token, and sees the very memory."""
    pool_id = leader.open_pool("members-map", block_count=4)
    side, response = greeted(harbor, joining(leader.welcome.join_token, 1))
    with side:
        welcome = response.welcome
        assert (welcome.session_id, welcome.tenant) == (leader.welcome.session_id, leader.welcome.tenant)
        assert (welcome.session_token, welcome.join_token) == ("", "")
        assert list(welcome.opened_pool_ids) == [pool_id]
        (own,), (theirs,) = leader.attach(pool_id)[1], ask(side, attach(pool_id))[1]
        os.pwrite(own, b"here", BLOCK_BYTES)
        assert os.pread(theirs, 4, BLOCK_BYTES) == b"here"
        os.close(own)
        os.close(theirs)
        metadata = (("kvharbor-session", welcome.member_token),)
        with refused() as found:
            leader.cache.Stats(cache.StatsRequest(), metadata=metadata, timeout=10)
        assert found[0].reason == "SESSION_UNKNOWN"


def test_a_member_gets_no_pool_that_the_leader_has_not_opened(harbor: str, leader: RawCaller) -> None:
    """What one opens later all may attach later."""
    with RawCaller(harbor) as other:
        pool_id = other.open_pool("members-unopened", block_count=4)
        side, _ = greeted(harbor, joining(leader.welcome.join_token, 1))
        with side:
            response, _ = ask(side, attach(pool_id))
            assert response.refused.reason == errors_pb2.ERROR_REASON_POOL_NOT_FOUND
            leader.open_pool("members-unopened", block_count=4)
            response, fds = ask(side, attach(pool_id))
            assert response.attached.pool.pool_id == pool_id
            os.close(fds[0])


def test_a_reading_member_cannot_map_for_writing(harbor: str, leader: RawCaller) -> None:
    """Its descriptor is open for reading only."""
    pool_id = leader.open_pool("members-read", block_count=4)
    side, _ = greeted(harbor, joining(leader.welcome.join_token, 1, RO))
    with side:
        (fd,) = ask(side, attach(pool_id))[1]
        with mmap.mmap(fd, mmap.PAGESIZE, prot=mmap.PROT_READ) as mapped:
            assert mapped[:1] == b"\0"
        with pytest.raises(PermissionError):
            mmap.mmap(fd, mmap.PAGESIZE)
        os.close(fd)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"rank": 0}, errors_pb2.ERROR_REASON_INVALID_FIELD),
        ({"rank": -1}, errors_pb2.ERROR_REASON_INVALID_FIELD),
        ({"rank": 65_536}, errors_pb2.ERROR_REASON_INVALID_FIELD),
        ({"rank": 1, "mode": 7}, errors_pb2.ERROR_REASON_INVALID_FIELD),
        ({"rank": 1, "join_token": "guessed"}, errors_pb2.ERROR_REASON_SESSION_UNKNOWN),
        ({"rank": 1, "join_token": ""}, errors_pb2.ERROR_REASON_SESSION_UNKNOWN),
        ({"rank": 3}, errors_pb2.ERROR_REASON_RANK_TAKEN),
    ],
)
def test_who_may_not_join_is_told_why(
    harbor: str, leader: RawCaller, asked: dict[str, object], reason: errors_pb2.ErrorReason.ValueType
) -> None:
    """And the session goes on as it was."""
    taken, response = greeted(harbor, joining(leader.welcome.join_token, 3))
    assert response.HasField("welcome")
    join = side_pb2.Join(**{"join_token": leader.welcome.join_token, **asked})  # type: ignore[arg-type]
    side, response = greeted(harbor, hello(join=join))
    with side, taken:
        assert response.refused.reason == reason
        ranks = [member.rank for member in sessions_of(leader)[leader.welcome.session_id].members]
        assert ranks == [0, 3]


def test_a_hello_joins_or_resumes(harbor: str) -> None:
    """Both at once means nothing."""
    side, response = greeted(harbor, hello(join=side_pb2.Join(), resume=side_pb2.Resume()))
    with side:
        assert response.refused.reason == errors_pb2.ERROR_REASON_INVALID_FIELD


def test_the_loss_of_any_member_ends_the_session(harbor: str, leader: RawCaller) -> None:
    """The leader finds out by its socket and by its calls."""
    with SessionWorker(harbor, without_session=True) as worker:
        join_in(worker, leader, 1)
        worker.kill()
        assert leader.side.recv(1) == b""
        with refused() as found:
            leader.call(leader.cache.Stats, cache.StatsRequest())
        assert found[0].reason == "SESSION_UNKNOWN"


def test_what_nobody_may_reuse_waits_for_every_writer(harbor: str, leader: RawCaller) -> None:
    """Both wrote into one block. One is gone; the other may still write."""
    with RawCaller(harbor) as watcher:
        pool_id = watcher.open_pool("members-writers", block_count=4)
        leader.open_pool("members-writers", block_count=4)
        leader.allocate(pool_id, *range(32))
        with (
            SessionWorker(harbor, without_session=True) as first,
            SessionWorker(harbor, without_session=True) as second,
        ):
            join_in(first, leader, 1)
            join_in(second, leader, 2)
            first.kill()
            leader.abandon()
            session = until(
                lambda: sessions_of(watcher)[leader.welcome.session_id], lambda it: not it.members[0].connected
            )
            assert session.state == pools.SESSION_STATE_ENDING
            assert [(member.connected, member.exited) for member in session.members] == [
                (False, False),
                (False, True),
                (True, False),
            ]
            assert session.holdings[0].private_block_count == 2
            assert watcher.stats(pool_id).quarantined_block_count == 2


def test_a_reader_holds_up_what_was_read_but_not_what_was_written(service: ServiceProcess) -> None:
    """Writers gone: the reserved blocks are free. The reader gone too: so are the holds."""
    path = str(service.socket)
    with RawCaller(path) as watcher, SessionWorker(path) as writer, SessionWorker(path, without_session=True) as reader:
        pool_id = watcher.open_pool("p", block_count=4)
        join_token = writer.run(
            "caller.open_pool('p', block_count=4)\n"
            "one = caller.allocate(pool_id, *range(40))\n"
            "caller.commit(pool_id, one.sequence_id, 32)\n"
            "result = caller.welcome.join_token",
            pool_id=pool_id,
        )
        assert reader.run(JOIN, join_token=join_token, rank=1, mode=RO)
        writer.kill()
        stats = until(lambda: watcher.stats(pool_id), lambda now: now.free_block_count == 2)
        assert (stats.active_block_count, stats.quarantined_block_count) == (2, 0)
        assert (
            watcher.call(watcher.cache.Evict, cache.EvictRequest(pool_id=pool_id, all_unheld=True)).evicted_block_count
            == 0
        )
        reader.kill()
        stats = until(lambda: watcher.stats(pool_id), lambda now: now.active_block_count == 0)
        assert (stats.cached_block_count, stats.free_block_count) == (2, 2)


def test_a_close_frees_at_once_though_members_live(harbor: str, leader: RawCaller) -> None:
    """It asserts that none of them touches a block any more; their sockets end with it."""
    with RawCaller(harbor) as watcher:
        pool_id = watcher.open_pool("members-close", block_count=4)
        leader.open_pool("members-close", block_count=4)
        leader.allocate(pool_id, *range(32))
        side, _ = greeted(harbor, joining(leader.welcome.join_token, 1))
        with side:
            closed = leader.call(leader.pools.CloseSession, pools.CloseSessionRequest())
            assert closed.released_sequence_count == 1
            assert watcher.stats(pool_id).free_block_count == 4
            assert leader.welcome.session_id not in sessions_of(watcher)
            assert side.recv(1) == b""


def test_a_close_ends_the_waiting_of_a_lost_session(harbor: str, leader: RawCaller) -> None:
    """Ranks exit before the leader says that all is done: what it says is proof enough."""
    with RawCaller(harbor) as watcher, SessionWorker(harbor, without_session=True) as worker:
        pool_id = watcher.open_pool("members-late", block_count=4)
        leader.open_pool("members-late", block_count=4)
        leader.allocate(pool_id, *range(32))
        join_in(worker, leader, 1)
        worker.kill()
        assert leader.side.recv(1) == b""
        assert watcher.stats(pool_id).quarantined_block_count == 2
        closed = leader.call(leader.pools.CloseSession, pools.CloseSessionRequest())
        assert closed.released_sequence_count == 1
        assert watcher.stats(pool_id).free_block_count == 4
