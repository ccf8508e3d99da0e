"""Sockets of one session: whose it is is proved for each, and the newest is its life."""

import os

import pytest

from integration.session_states import ended, states
from kvharbor.server.sessions.members import MAX_SOCKETS
from kvharbor.v1 import cache_service_pb2 as cache
from kvharbor.v1 import errors_pb2, side_pb2
from kvharbor.v1 import pool_service_pb2 as pools
from raw_caller import RawCaller, greeted, joining, refused, resuming
from session_worker import SessionWorker
from waiting import until


def test_a_live_session_may_take_a_further_socket(caller: RawCaller) -> None:
    """The newest is its life: an older one may end, and the session goes on."""
    pool_id = caller.open_pool("resume-live", block_count=4)
    sequence = caller.allocate(pool_id, *range(16))
    welcome = caller.resume().welcome
    assert (welcome.session_id, welcome.session_token) == (caller.welcome.session_id, caller.welcome.session_token)
    assert (welcome.join_token, list(welcome.opened_pool_ids)) == (caller.welcome.join_token, [pool_id])
    caller.older_sides[0].close()
    assert caller.commit(pool_id, sequence.sequence_id, 16).committed_tokens == 16
    response, fds = caller.attach(pool_id)
    assert response.attached.pool.pool_id == pool_id
    os.close(fds[0])


def test_the_end_of_the_newest_socket_ends_the_session_whatever_older_ones_do(caller: RawCaller) -> None:
    """Whoever resumes and closes has gone."""
    caller.resume()
    caller.side.close()
    assert ended(caller.older_sides[0])
    with refused() as found:
        caller.call(caller.cache.Stats, cache.StatsRequest())
    assert found[0].reason == "SESSION_UNKNOWN"


def test_an_older_socket_that_is_open_elsewhere_keeps_the_blocks(harbor: str, caller: RawCaller) -> None:
    """Quiet means that every socket which the member ever had has ended."""
    with SessionWorker(harbor) as worker:
        pool_id = worker.run(
            "result = caller.open_pool('resume-older', block_count=4)\ncaller.allocate(result, *range(32))"
        )
        worker.fork()
        worker.run("caller.resume()")
        worker.kill()
        stats = until(lambda: caller.stats(pool_id), lambda now: now.quarantined_block_count == 2)
        assert stats.free_block_count == 2
        worker.end_children()
        until(lambda: caller.stats(pool_id), lambda now: now.free_block_count == 4)


@pytest.mark.parametrize(
    ("token", "epoch", "reason"),
    [
        ("own", "000000000000", errors_pb2.ERROR_REASON_STALE_EPOCH),
        ("guessed", "own", errors_pb2.ERROR_REASON_SESSION_UNKNOWN),
        ("", "own", errors_pb2.ERROR_REASON_SESSION_UNKNOWN),
    ],
)
def test_who_may_not_resume_is_told_why(
    harbor: str, caller: RawCaller, token: str, epoch: str, reason: errors_pb2.ErrorReason.ValueType
) -> None:
    """And the session goes on."""
    request = resuming(
        caller.welcome.session_token if token == "own" else token, caller.welcome.epoch if epoch == "own" else epoch
    )
    side, response = greeted(harbor, request)
    with side:
        assert response.refused.reason == reason
        if reason == errors_pb2.ERROR_REASON_STALE_EPOCH:
            told = response.refused.metadata
            assert (told["epoch"], told["currentEpoch"]) == (epoch, caller.welcome.epoch)
            assert told["remedy"] == "end all work on its memory, map that no more, then say hello without `resume`"
            assert response.refused.message.startswith("the session is of epoch 000000000000")
            assert response.refused.message.endswith(told["remedy"])
        assert ended(side)
    assert states(caller)[caller.welcome.session_id] == pools.SESSION_STATE_LIVE


def test_a_member_has_so_many_sockets_and_no_more(harbor: str, caller: RawCaller) -> None:
    """All of them are kept in one message; whoever never closes one is refused, and nobody notices."""
    epoch = caller.welcome.epoch
    for _ in range(MAX_SOCKETS - 1):
        assert caller.resume().HasField("welcome")
    side, response = greeted(harbor, resuming(caller.welcome.session_token, epoch))
    with side:
        assert response.refused.reason == errors_pb2.ERROR_REASON_INVALID_FIELD
    assert states(caller)[caller.welcome.session_id] == pools.SESSION_STATE_LIVE
    caller.older_sides.pop().close()

    def again() -> side_pb2.SideResponse:
        side, answer = greeted(harbor, resuming(caller.welcome.session_token, epoch))
        caller.older_sides.append(caller.side)
        caller.side = side
        return answer

    until(again, lambda answer: answer.HasField("welcome"))


def test_another_process_cannot_resume_a_session(harbor: str, caller: RawCaller) -> None:
    """Not even one that has the token, as a fork would."""
    with SessionWorker(harbor, without_session=True) as thief:
        reason = thief.run(
            "side, answer = raw.greeted(path, raw.resuming(token, epoch)); result = answer.refused.reason",
            token=caller.welcome.session_token,
            epoch=caller.welcome.epoch,
        )
    assert reason == errors_pb2.ERROR_REASON_PEER_UNPROVEN


def test_a_member_resumes_by_its_own_token(harbor: str, caller: RawCaller) -> None:
    """It is told the pools, and no session token."""
    pool_id = caller.open_pool("resume-member", block_count=4)
    side, response = greeted(harbor, joining(caller.welcome.join_token, 1, side_pb2.MEMBER_MODE_READ_ONLY))
    again, resumed = greeted(harbor, resuming(response.welcome.member_token, caller.welcome.epoch))
    with side, again:
        assert list(resumed.welcome.opened_pool_ids) == [pool_id]
        assert (resumed.welcome.session_token, resumed.welcome.member_token) == ("", response.welcome.member_token)
