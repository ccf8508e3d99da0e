"""Members of a session, and ranks with parts of their own, of the C++ client beside the Python client."""

from collections.abc import Callable

import pytest

from cpp_worker import CppError, CppWorker
from integration.client_worker import LAYOUT, pool_size, stamp
from integration.cpp_sessions import MODEL, StartWorker
from kvharbor.client import InvalidField, connect
from service_process import ServiceProcess
from waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_members_of_a_session_share_it_across_languages(service: ServiceProcess, start_worker: StartWorker) -> None:
    """C13: a reader of the other language, on both sides; what it has been given is read-only and it makes no calls."""
    with connect(service.target) as leader, CppWorker() as member:
        pool = leader.open_pool("p", LAYOUT, pool_size(8))
        held = pool.allocate(range(16))
        stamp(pool, held, 0, [7.0] * 16)
        assert member.join(service.socket, 5000, leader.join_token, 1, 1) == leader.session_id
        member.attach_pool(pool.id, 0)
        assert member.peek("k", 1, int(held.table[0])) == 7.0
        with pytest.raises(CppError, match="reading only"):
            member.fill("k", 0, 0, 1.0)
        with pytest.raises(CppError, match="its leader opens the pool") as refusal:
            member.open("p", MODEL, 1, 0)
        assert refusal.value.reason == "SESSION_REQUIRED"
        service.restart_child()
        member.attach_pool(pool.id, 0)
        assert pool.stats().sequence_count == 1
    leader_worker = start_worker(service)
    opened = leader_worker.call("open", "q", MODEL, 1, pool_size(8))
    join_token = leader_worker.joining()
    with connect(service.target, join=join_token, rank=1, read_only=True) as reader:
        leader_worker.attach(0)
        leader_worker.fill("v", 1, 3, 5.0)
        assert (reader.attach_pool(opened["pool_id"]).views.numpy("v", 1)[3] == 5.0).all()


def test_each_rank_maps_its_own_part(service: ServiceProcess, start_worker: StartWorker) -> None:
    """The same block is other bytes in each part; a part that is not there is refused, named or by the rank."""
    leader = start_worker(service)
    opened = leader.call("open", "tp", MODEL, 2, pool_size(8))
    with (
        CppWorker() as member,
        CppWorker() as beyond,
        connect(service.target, join=leader.joining(), rank=3, read_only=True) as reader,
    ):
        member.join(service.socket, 5000, leader.joining(), 1, 0)
        beyond.join(service.socket, 5000, leader.joining(), 2, 0)
        for worker, part in ((leader, 0), (member, 1)):
            assert worker.attach_pool(opened["pool_id"]) == part
            worker.fill("k", 0, 2, 10.0 + part)
        for worker, part in ((leader, 0), (member, 1)):
            assert worker.peek("k", 0, 2) == 10.0 + part
        assert (reader.attach_pool(opened["pool_id"], part=1).views.numpy("k", 0)[2] == 11.0).all()
        assert reader.attach_pool(opened["pool_id"], part=0).part == 0
        for worker, named in ((member, (2,)), (beyond, ())):
            with pytest.raises(CppError, match="part is 2, must be 0 to 1, the ranks of the pool's layout") as refusal:
                worker.attach_pool(opened["pool_id"], *named)
            assert (refusal.value.kind, refusal.value.metadata["field"]) == ("CallerMistake", "part")
        with pytest.raises(InvalidField, match="part is 3, must be 0 to 1, the ranks of the pool's layout"):
            reader.attach_pool(opened["pool_id"])


def test_members_of_an_engine_that_is_not_tensor_parallel_share_its_one_part(
    service: ServiceProcess, start_worker: StartWorker
) -> None:
    """Without a part named, each maps part 0. The leader is told which one of them has gone."""
    leader = start_worker(service, "p")
    pool_id = leader.call("open", "p", MODEL, 1, 0)["pool_id"]
    with CppWorker() as member:
        member.join(service.socket, 5000, leader.joining(), 5, 0)
        assert member.attach_pool(pool_id) == 0
        member.fill("k", 0, 2, 5.0)
    assert leader.peek("k", 0, 2) == 5.0
    lost = until(lambda: failure_of(leader.stats))
    assert lost is not None
    assert (lost.kind, lost.reason) == ("SessionGone", "SESSION_UNKNOWN")
    assert f"the member of rank 5 (pid {member.process.pid}) has gone" in lost.metadata["cause"]


def failure_of(call: Callable[[], object]) -> CppError | None:
    """Returns what a call is refused with; None if it is not."""
    try:
        call()
    except CppError as failure:
        return failure
    return None
