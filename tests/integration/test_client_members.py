"""An engine of several processes: a leader that calls, members that map what it has opened."""

import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from integration.client_kinds import Connect
from integration.client_worker import LAYOUT, pool_size, read, serve_member, stamp
from kvharbor.client import HarborError, PoolNotFound, RankTaken, SessionLost, SessionRequired, connect
from service_process import DEADLINE_S, ServiceProcess

pytestmark = pytest.mark.slow


def test_a_member_reads_what_the_leader_has_written(open_harbor: Connect, service: ServiceProcess) -> None:
    """C13: it is in the leader's session, has views for reading, and makes no calls."""
    leader = open_harbor(service.target)
    pool = leader.open_pool("p", LAYOUT, pool_size(8))
    held = pool.allocate(range(16))
    stamp(pool, held, 0, range(16))
    member = open_harbor(service.target, join=leader.join_token, rank=1, read_only=True)
    assert (member.session_id, member.epoch) == (leader.session_id, leader.epoch)
    memory = member.attach_pool(pool.id)
    view = memory.views.numpy("k", 0)
    assert view[held.table[0], :, 0, 0].tolist() == list(range(16))
    assert not view.flags.writeable
    with pytest.raises(SessionRequired, match="a member of a session makes no calls"):
        member.open_pool("p", LAYOUT)
    with pytest.raises(PoolNotFound):
        member.attach_pool(f"{pool.id}9")
    with pytest.raises(RankTaken):
        open_harbor(service.target, join=leader.join_token, rank=1)
    with pytest.raises(SessionLost):
        open_harbor(service.target, join="no such token", rank=2)
    held.release()


def test_members_go_on_with_the_next_process(open_harbor: Connect, service: ServiceProcess) -> None:
    """Each resumes by its own token; the session lives as long as all of them."""
    leader = open_harbor(service.target)
    pool = leader.open_pool("p", LAYOUT, pool_size(8))
    held = pool.allocate(range(16))
    member = open_harbor(service.target, join=leader.join_token, rank=1)
    memory = member.attach_pool(pool.id)
    for _ in range(2):
        service.restart_child()
        assert pool.stats().sequence_count == 1
        assert member.attach_pool(pool.id).pool_id == memory.pool_id
        memory.views.numpy("k", 0)[held.table[0], 3] = 8.0
        assert (pool.views.numpy("k", 0)[held.table[0], 3] == 8.0).all()
    assert held.commit(16).committed_tokens == 16
    held.release()


def test_the_loss_of_a_member_is_the_loss_of_the_session(service: ServiceProcess) -> None:
    """kill -9 of a rank: the leader's calls say so, and what was not committed is withdrawn."""
    context = multiprocessing.get_context("spawn")
    with connect(service.target) as leader:
        pool = leader.open_pool("p", LAYOUT, pool_size(8))
        held = pool.allocate(range(16))
        pipe, theirs = context.Pipe()
        rank = context.Process(
            target=serve_member, args=(theirs, service.target, leader.join_token, pool.id), daemon=True
        )
        rank.start()
        theirs.close()
        assert pipe.poll(DEADLINE_S)
        assert pipe.recv() == leader.session_id
        assert read(pool, held, 0, 16) != [5.0] * 16
        assert (pool.views.numpy("k", 0) == 5.0).all()
        rank.kill()
        rank.join()
        pipe.close()
        lost = service.wait_for("member lost")
        assert (lost["session"], lost["rank"], lost["pid"]) == (int(leader.session_id), 1, rank.pid)
        service.wait_for("session lost")
        failure = next(failures(pool.stats))
        assert isinstance(failure, SessionLost)
        assert f"the member of rank 1 (pid {rank.pid}) has gone" in str(failure)
        assert failure.metadata["cause"] in str(failure)
        held.release()


def failures(call: Callable[[], Any]) -> Iterator[HarborError]:
    """Yields the errors of a call that is made again and again."""
    while True:
        try:
            call()
        except HarborError as failure:
            yield failure
