"""Sessions go on when the service's process is replaced: what they hold is told, the rest is given back."""

import os

from conftest import StartService
from integration.session_states import ended, states
from kvharbor.v1 import errors_pb2, side_pb2
from kvharbor.v1 import pool_service_pb2 as pools
from raw_caller import RawCaller, ask, greeted, held_sequence, joining, refused, resuming, side_connection, tokens
from service_process import ServiceProcess
from session_worker import SessionWorker
from waiting import until


def test_a_session_goes_on_in_the_next_process(service: ServiceProcess) -> None:
    """The socket's end is the sign; the same token; no call before the pool is resumed; then as if nothing was."""
    with RawCaller(str(service.socket)) as caller:
        pool_id = caller.open_pool("p", block_count=4)
        sequence = caller.allocate(pool_id, *range(40))
        caller.commit(pool_id, sequence.sequence_id, 16)
        service.restart_child()
        assert ended(caller.side)
        assert states(caller)[caller.welcome.session_id] == pools.SESSION_STATE_RESUMING
        with refused() as found:
            caller.allocate(pool_id, 1)
        assert (found[0].reason, found[0].metadata["poolId"]) == ("RESUME_REQUIRED", pool_id)
        with refused() as found:
            caller.resume_pool(pool_id)
        assert found[0].reason == "RESUME_REQUIRED"
        welcome = caller.resume().welcome
        assert list(welcome.opened_pool_ids) == [pool_id]
        with refused() as found:
            caller.allocate(pool_id, 1)
        assert found[0].reason == "RESUME_REQUIRED"
        own = held_sequence(sequence, committed_tokens=16, tail=tokens(*range(16, 40)), computed_tokens=32)
        for _ in range(2):
            response = caller.resume_pool(pool_id, own)
            (result,) = response.results
            assert (result.status.code, result.committed_tokens) == (0, 32)
            assert result.sequence.sequence_id == sequence.sequence_id
            assert result.sequence.table == sequence.table
        caller.older_sides.pop().close()
        assert caller.commit(pool_id, sequence.sequence_id, 40).committed_tokens == 32
        stats = caller.stats(pool_id)
        assert (stats.free_block_count, stats.reserved_block_count, stats.active_block_count) == (1, 1, 2)


def test_what_is_not_named_is_given_back(service: ServiceProcess) -> None:
    """Commits stay, the rest is free, and a name of somebody else's is refused."""
    path = str(service.socket)
    with RawCaller(path) as caller, RawCaller(path) as other:
        pool_id = caller.open_pool("p", block_count=8)
        other.open_pool("p", block_count=8)
        kept = caller.allocate(pool_id, *range(32))
        dropped = caller.allocate(pool_id, *range(100, 132))
        caller.commit(pool_id, dropped.sequence_id, 16)
        theirs = other.allocate(pool_id, *range(200, 216))
        service.restart_child()
        assert ended(caller.side)
        caller.resume()
        own = held_sequence(kept, tail=tokens(*range(32)))
        stolen = held_sequence(kept, tail=tokens(*range(16)))
        stolen.sequence.sequence_id = f"{kept.sequence_id}9"
        stolen.sequence.table.CopyFrom(theirs.table)
        stolen.sequence.token_count, stolen.sequence.capacity_tokens = 16, 16
        response = caller.resume_pool(pool_id, own, stolen)
        assert [result.status.reason for result in response.results] == [0, errors_pb2.ERROR_REASON_STALE_GENERATION]
        stats = caller.stats(pool_id)
        assert (stats.free_block_count, stats.reserved_block_count) == (8 - 2 - 1 - 1, 2)
        # The other's block waits for him to come back.
        assert stats.quarantined_block_count == 1
        # The committed block may be somebody's, until everybody has said what is his.
        assert stats.cached_block_count == 0
        other.close()
        stats = caller.stats(pool_id)
        assert (stats.cached_block_count, stats.reserved_block_count, stats.free_block_count) == (1, 2, 5)


def test_a_worker_that_died_meanwhile_is_found_dead(start_fresh: StartService) -> None:
    """By the pidfd and the socket that the supervisor has kept; what it had committed is there for others."""
    service = start_fresh()
    path = str(service.socket)
    with RawCaller(path) as watcher, SessionWorker(path) as worker:
        pool_id = worker.run(
            "result = caller.open_pool('p', block_count=4)\n"
            "one = caller.allocate(result, *range(40))\n"
            "caller.commit(result, one.sequence_id, 16)"
        )
        watcher.open_pool("p", block_count=4)
        service.kill_child()
        worker.kill()
        service.wait_for("ready", 2)
        watcher.resume()
        watcher.resume_pool(pool_id)
        stats = until(lambda: watcher.stats(pool_id), lambda now: now.sequence_count == 0 and now.free_block_count == 3)
        assert stats.cached_block_count == 1
        assert len(states(watcher)) == 1


def test_a_fork_that_outlives_both_keeps_its_blocks(service: ServiceProcess) -> None:
    """The worker dies, then the service's process: its child still has the socket."""
    path = str(service.socket)
    with RawCaller(path) as watcher, SessionWorker(path) as worker:
        pool_id = worker.run("result = caller.open_pool('p', block_count=4)\ncaller.allocate(result, *range(32))")
        worker.fork()
        watcher.open_pool("p", block_count=4)
        worker.kill()
        until(lambda: watcher.stats(pool_id), lambda now: now.quarantined_block_count == 2)
        service.restart_child()
        watcher.resume()
        watcher.resume_pool(pool_id)
        assert sorted(states(watcher).values()) == [pools.SESSION_STATE_LIVE, pools.SESSION_STATE_ENDING]
        assert watcher.stats(pool_id).free_block_count == 2
        worker.end_children()
        until(lambda: watcher.stats(pool_id), lambda now: now.free_block_count == 4)


def test_a_session_may_end_without_resuming(service: ServiceProcess) -> None:
    """By a close, in which it asserts what it would otherwise have to prove."""
    path = str(service.socket)
    with RawCaller(path) as watcher, RawCaller(path) as caller:
        pool_id = watcher.open_pool("p", block_count=4)
        caller.open_pool("p", block_count=4)
        caller.allocate(pool_id, *range(32))
        service.restart_child()
        caller.call(caller.pools.CloseSession, pools.CloseSessionRequest())
        watcher.resume()
        watcher.resume_pool(pool_id)
        assert watcher.stats(pool_id).free_block_count == 4


def test_what_a_lost_session_may_read_waits_even_if_it_has_not_resumed(service: ServiceProcess) -> None:
    """G3: it has committed all that it had, closes its socket instead of resuming, and reads on."""
    path = str(service.socket)
    with RawCaller(path) as watcher, SessionWorker(path) as worker:
        pool_id = worker.run(
            "result = caller.open_pool('p', block_count=4)\n"
            "one = caller.allocate(result, *range(32))\n"
            "caller.commit(result, one.sequence_id, 32)"
        )
        watcher.open_pool("p", block_count=4)
        service.restart_child()
        watcher.resume()
        watcher.resume_pool(pool_id)
        worker.run("caller.abandon()")
        until(lambda: states(watcher), lambda now: pools.SESSION_STATE_ENDING in now.values())
        with refused() as found:
            watcher.allocate(pool_id, *range(100, 148))
        assert found[0].reason == "POOL_EXHAUSTED"
        assert watcher.stats(pool_id).active_block_count == 2
        worker.kill()
        until(lambda: watcher.stats(pool_id), lambda now: now.cached_block_count == 2)
        watcher.allocate(pool_id, *range(100, 148))


def test_members_and_their_leader_resume_each_for_itself(service: ServiceProcess) -> None:
    """In any order; a member that does not come back has not gone."""
    path = str(service.socket)
    with RawCaller(path) as caller:
        pool_id = caller.open_pool("p", block_count=4)
        side, response = greeted(path, joining(caller.welcome.join_token, 1))
        idle, _ = greeted(path, joining(caller.welcome.join_token, 2))
        service.restart_child()
        assert ended(side)
        again, resumed = greeted(path, resuming(response.welcome.member_token, caller.welcome.epoch))
        assert list(resumed.welcome.opened_pool_ids) == [pool_id]
        assert states(caller)[caller.welcome.session_id] == pools.SESSION_STATE_RESUMING
        caller.resume()
        caller.resume_pool(pool_id)
        side.close()
        attached, fds = ask(again, side_pb2.SideRequest(attach=side_pb2.Attach(pool_id=pool_id)))
        assert attached.attached.pool.pool_id == pool_id
        os.close(fds[0])
        assert states(caller)[caller.welcome.session_id] == pools.SESSION_STATE_LIVE
        idle.close()
        assert ended(caller.side)
        again.close()


def test_who_resumes_needs_no_free_place(start_fresh: StartService) -> None:
    """The number of sessions is limited, and this one has its place already; a new one finds none."""
    service = start_fresh(max_sessions="1")
    path = str(service.socket)
    with RawCaller(path) as caller:
        service.restart_child()
        assert ended(caller.side)
        assert caller.resume().HasField("welcome")
        with side_connection(path) as late:
            assert ended(late)


def test_each_member_has_its_place_until_it_resumes(start_fresh: StartService) -> None:
    """That its leader has come back does not take the place of the one who has not yet."""
    service = start_fresh(max_sessions="2")
    path = str(service.socket)
    with RawCaller(path) as caller:
        side, response = greeted(path, joining(caller.welcome.join_token, 1))
        service.restart_child()
        assert caller.resume().HasField("welcome")
        again, resumed = greeted(path, resuming(response.welcome.member_token, caller.welcome.epoch))
        assert resumed.HasField("welcome")
        with side_connection(path) as late:
            assert ended(late)
        side.close()
        again.close()


def test_numbers_of_sessions_are_not_used_again(service: ServiceProcess) -> None:
    """A list, a log and a kill name a session by it."""
    path = str(service.socket)
    with RawCaller(path) as first:
        number = int(first.welcome.session_id)
    service.restart_child()
    with RawCaller(path) as second:
        assert int(second.welcome.session_id) > number
