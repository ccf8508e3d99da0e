"""The supervisor: what it is made of, and how it replaces its child."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import StartService
from integration.supervised import server_info, standby_of
from kvharbor.v1 import cache_service_pb2 as cache
from kvharbor.v1 import pool_service_pb2 as pools
from process_tree import children_of, has_ended, wait_until_ended
from raw_caller import RawCaller, greeted, hello, open_descriptor_count, tokens
from service_process import DEADLINE_S, ServiceProcess
from waiting import quickest, seconds, until

pytestmark = pytest.mark.slow
MOST_RECOVERY_S = 2.0


def test_it_imports_neither_grpc_nor_anything_for_devices() -> None:
    """S20: what may break in a library of another language ends a child, never its keeper."""
    program = (
        "import sys; import kvharbor.server.cli, kvharbor.server.supervision.supervisor\n"
        "import kvharbor.server.configuration.sources\n"
        "print(*sorted(sys.modules))"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    roots = {name.partition(".")[0] for name in loaded}
    assert roots & {"grpc", "google", "torch", "cupy", "cuda", "numpy"} == set()
    assert "kvharbor.pool" not in loaded


def test_it_never_maps_what_its_child_needs(service: ServiceProcess) -> None:
    """S20: as the kernel sees it, too: gRPC is in the child's memory, and an arena in neither but the child's."""
    with RawCaller(str(service.socket)) as caller:
        caller.open_pool("p")
        maps = {pid: Path(f"/proc/{pid}/maps").read_text() for pid in (service.process.pid, service.child_pid)}
    own, childs = maps[service.process.pid], maps[service.child_pid]
    assert [name in childs for name in ("cygrpc", "memfd:kvharbor-p", "numpy")] == [True] * 3
    assert [name in own for name in ("cygrpc", "memfd:kvharbor-p", "numpy")] == [False] * 3


def test_a_killed_child_is_replaced_at_once(start_fresh: StartService) -> None:
    """G7: the same epoch at the same addresses, counted as a restart; the port stays although any would have done."""
    service = start_fresh(listen="127.0.0.1:0", log_level="debug")
    first = service.wait_for("ready")
    lives = [first]

    def recovery_s() -> float:
        # The first stood by for a moment too.
        service.wait_for("process stands by", len(lives) + 1)
        return seconds(lambda: lives.append(service.restart_child()))

    assert quickest(recovery_s, MOST_RECOVERY_S) < MOST_RECOVERY_S
    assert len({life["pid"] for life in lives}) == len(lives)
    for name in ("epoch", "socket", "side_socket", "listen", "memory_bytes"):
        assert len({life[name] for life in lives}) == 1
    info = server_info(service)
    assert (info.epoch, info.restart_count) == (first["epoch"], len(lives) - 1)
    ended = service.wait_for("service process ended")
    assert (ended["cause"], ended["status"], ended["restart_pause_s"]) == ("killed", -signal.SIGKILL, 0.0)


def test_what_was_committed_outlives_the_process(start_fresh: StartService) -> None:
    """G7: pools keep their names, ids and memory; a new session opens them and finds what the old one committed."""
    service = start_fresh()
    path = str(service.socket)
    with RawCaller(path) as caller:
        pool_id = caller.open_pool("p")
        request = cache.AllocateRequest(pool_id=pool_id, token_ids=tokens(*range(40)))
        sequence = caller.call(caller.cache.Allocate, request).sequence
        item = cache.CommitItem(sequence_id=sequence.sequence_id, computed_tokens=40)
        caller.call(caller.cache.Commit, cache.CommitRequest(pool_id=pool_id, items=[item]))
        (fd,) = caller.attach(pool_id)[1]
    available_bytes = server_info(service).memory_available_bytes
    service.restart_child()
    assert service.wait_for("pool recovered")["pool"] == pool_id
    with RawCaller(path) as caller:
        assert caller.open_pool("p") == pool_id
        (again,) = caller.attach(pool_id)[1]
        assert os.path.samestat(os.fstat(fd), os.fstat(again))
        found = caller.call(caller.cache.Lookup, cache.LookupRequest(pool_id=pool_id, token_ids=tokens(*range(40))))
        assert found.present_tokens == 32
        request = cache.AllocateRequest(pool_id=pool_id, token_ids=tokens(*range(40)))
        assert caller.call(caller.cache.Allocate, request).sequence.cached_tokens == 32
        assert server_info(service).memory_available_bytes == available_bytes
    os.close(fd)
    os.close(again)


def test_a_dropped_pool_stays_dropped_and_its_number_is_not_used_again(service: ServiceProcess) -> None:
    """Its memory is the budget's again, in the next process too."""
    path = str(service.socket)
    with RawCaller(path) as caller:
        dropped = caller.open_pool("p")
        caller.call(caller.pools.DropPool, pools.DropPoolRequest(pool_id=dropped))
    service.restart_child()
    assert service.entries("pool recovered") == []
    with RawCaller(path) as caller:
        info = caller.pools.GetServerInfo(pools.GetServerInfoRequest(), timeout=DEADLINE_S)
        assert info.memory_available_bytes == info.memory_bytes
        assert caller.open_pool("p") != dropped


def test_children_killed_one_after_the_other_leave_nothing_behind(service: ServiceProcess) -> None:
    """Neither descriptors in the supervisor nor zombies; each is replaced without a pause, standby or not."""
    for _ in range(5):
        service.restart_child()
    standby_of(service)
    before = open_descriptor_count(service.process.pid)
    for _ in range(4):
        service.restart_child()
        standby_of(service)
    # A child is there a moment before the supervisor has let go of its end of things.
    until(lambda: open_descriptor_count(service.process.pid) <= before)
    assert [has_ended(pid) for pid in children_of(service.process.pid)] == [False, False]
    assert [entry["restart_pause_s"] for entry in service.entries("service process ended")] == [0.0] * 9
    assert server_info(service).restart_count == 9


def test_a_restart_needs_no_more_descriptors(service: ServiceProcess) -> None:
    """Else the process that comes next would break on what the one before could hold, and all would be lost."""
    sides = [greeted(str(service.socket), hello())[0] for _ in range(80)]
    before = open_descriptor_count(service.child_pid)
    # A child that waits already has the limits of before.
    os.kill(standby_of(service), signal.SIGKILL)
    service.wait_for("standby process ended")
    resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE, (before + 20, before + 20))
    assert service.restart_child()["restart_count"] == 1
    assert open_descriptor_count(service.child_pid) <= before + 10
    for side in sides:
        side.close()


def test_a_recovered_pool_that_is_dropped_leaves_no_descriptor(service: ServiceProcess) -> None:
    """What start-up has made, no collector looks at again: it has to go without one."""
    with RawCaller(str(service.socket)) as caller:
        before = open_descriptor_count(service.child_pid)
        pool_ids = [caller.open_pool(f"p{number}", block_count=4) for number in range(8)]
        service.restart_child()
        caller.resume()
        for pool_id in pool_ids:
            caller.call(caller.pools.DropPool, pools.DropPoolRequest(pool_id=pool_id))
        assert open_descriptor_count(service.child_pid) <= before + 4


def test_a_standby_that_dies_is_not_missed(service: ServiceProcess) -> None:
    """The next restart starts a process of its own."""
    os.kill(standby_of(service), signal.SIGKILL)
    service.wait_for("standby process ended")
    assert service.restart_child()["restart_count"] == 1


def test_the_children_die_with_their_supervisor(service: ServiceProcess) -> None:
    """S20: nobody serves what nobody keeps; a start after it is cold, with another epoch, and says so."""
    children = [service.child_pid, standby_of(service)]
    service.kill()
    for pid in children:
        wait_until_ended(pid)


def test_the_start_after_a_killed_supervisor_is_cold(start_fresh: StartService, tmp_path: Path) -> None:
    """Its epoch is new, nothing of the old is served, and the log says why."""
    path = tmp_path / "a.sock"
    killed = start_fresh(socket=path)
    with RawCaller(str(path)) as caller:
        caller.open_pool("p")
        killed.kill()
    service = start_fresh(socket=path)
    ready = service.wait_for("ready")
    assert ready["epoch"] != killed.wait_for("ready")["epoch"]
    assert ready["restart_count"] == 0
    assert service.wait_for("the service before was killed: nothing of it is left, this start is cold")
    with RawCaller(str(path)) as caller:
        listed = caller.call(caller.pools.ListPools, pools.ListPoolsRequest())
        assert list(listed.pools) == []


def test_two_supervisors_never_serve_one_path(start_fresh: StartService, tmp_path: Path) -> None:
    """S5: the one that comes right after a kill waits for the last child, stopped as that may be; then it serves."""
    path = tmp_path / "a.sock"
    killed = start_fresh(socket=path)
    child = killed.child_pid
    killed.process.kill()
    with ServiceProcess(path, "--memory=1MiB") as following:
        ready = following.wait_for("ready")
        assert has_ended(child)
        assert ready["epoch"] != killed.wait_for("ready")["epoch"]
        killed.wait()
        assert following.stop() == 0
