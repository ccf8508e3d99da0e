"""The supervisor: what it is made of, and what it does when its child ends."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest

from conftest import StartService
from kvharbor.v1 import cache_service_pb2 as cache
from kvharbor.v1 import pool_service_pb2 as pools
from raw_caller import RawCaller, greeted, hello, open_descriptor_count, refused, tokens
from service_process import DEADLINE_S, ServiceProcess
from waiting import until

pytestmark = pytest.mark.slow
MOST_RECOVERY_S = 2.0


def server_info(service: ServiceProcess) -> pools.GetServerInfoResponse:
    """Asks the service about itself."""
    with RawCaller(str(service.socket)) as caller:
        return caller.pools.GetServerInfo(pools.GetServerInfoRequest(), timeout=DEADLINE_S)


def children_of(pid: int) -> list[int]:
    """Returns the children of a process; the list is empty once it is gone."""
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def has_ended(pid: int) -> bool:
    """Tells whether a process is gone, or waits for nothing but its parent to take note."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until_ended(pid: int) -> None:
    """Waits for the end of a process that is no child of this one."""
    until(lambda: has_ended(pid))


def standby_of(service: ServiceProcess) -> int:
    """Waits for the child that waits for its turn, and returns its pid."""
    return until(lambda: set(children_of(service.process.pid)) - {service.child_pid}).pop()


def test_it_imports_neither_grpc_nor_anything_for_devices() -> None:
    """S20: what may break in a library of another language ends a child, never its keeper."""
    program = (
        "import sys; import kvharbor.server.cli, kvharbor.server.supervisor, kvharbor.server.sources\n"
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
    # The first stood by for a moment too.
    service.wait_for("process stands by", 2)
    killed_at = time.monotonic()
    second = service.restart_child()
    assert time.monotonic() - killed_at < MOST_RECOVERY_S
    assert second["pid"] != first["pid"]
    same = ("epoch", "socket", "side_socket", "listen", "memory_bytes")
    assert [second[name] for name in same] == [first[name] for name in same]
    info = server_info(service)
    assert (info.epoch, info.restart_count) == (first["epoch"], 1)
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


def test_an_upgrade_is_a_restart_in_order(start_fresh: StartService, tmp_path: Path) -> None:
    """SIGHUP: the new process is there before the old one goes, with the settings as they are now; blocks stay."""
    config = tmp_path / "kvharbor.toml"
    config.write_text('grace_s = 4.0\nmemory = "8MiB"\n')
    service = start_fresh(environment={"KVHARBOR_CONFIG": str(config)}, memory="16MiB")
    path = str(service.socket)
    with RawCaller(path) as caller:
        pool_id = caller.open_pool("p")
        stream = caller.cache.Watch(cache.WatchRequest(pool_id=pool_id), metadata=caller.metadata)
        next(stream)
        config.write_text('grace_s = 3.0\nmemory = "8MiB"\n')
        service.process.send_signal(signal.SIGHUP)
        with refused() as found:
            list(stream)
        assert (found[0].code, found[0].reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        ready = service.wait_for("ready", 2)
    assert (ready["epoch"], ready["restart_count"]) == (service.wait_for("ready")["epoch"], 1)
    ended = service.wait_for("service process ended")
    assert (ended["cause"], ended["status"], ended["restart_pause_s"], ended["level"]) == ("upgraded", 0, 0.0, "info")
    assert service.entries("draining")[0]["grace_s"] == 4.0
    with RawCaller(path) as caller:
        assert caller.open_pool("p") == pool_id
    assert service.stop() == 0
    assert service.entries("draining")[1]["grace_s"] == 3.0


def test_an_upgrade_to_what_cannot_start_changes_nothing(start_fresh: StartService, tmp_path: Path) -> None:
    """The old process goes on, and the log has why."""
    config = tmp_path / "kvharbor.toml"
    config.write_text("grace_s = 4.0\n")
    service = start_fresh(environment={"KVHARBOR_CONFIG": str(config)})
    config.write_text("grace_s = -1\n")
    service.process.send_signal(signal.SIGHUP)
    service.wait_for("upgrade given up: the new process does not start, the old one goes on")
    assert "kvharbor: setting grace_s (file)" in service.log
    assert server_info(service).restart_count == 0


def test_the_command_waits_for_the_new_process(service: ServiceProcess) -> None:
    """`kvharbor upgrade` ends when it serves."""
    command = [sys.executable, "-m", "kvharbor.server.cli", "upgrade", f"--socket={service.socket}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "process 2 of its epoch" in done.stdout
    assert service.wait_for("ready", 2)["restart_count"] == 1


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
    while open_descriptor_count(service.process.pid) > before:
        pass
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


def test_a_hanging_child_is_replaced(start_fresh: StartService) -> None:
    """E7, the endless variant: whose event loop does not turn for watchdog_s is killed, which is logged and counted."""
    service = start_fresh(watchdog_s="2")
    stopped = service.child_pid
    os.kill(stopped, signal.SIGSTOP)
    assert service.wait_for("service process hangs")["pid"] == stopped
    assert service.wait_for("ready", 2)["restart_count"] == 1
    assert service.wait_for("service process ended")["cause"] == "hung"


def test_a_child_that_was_stopped_for_less_goes_on(start_fresh: StartService) -> None:
    """Silence is no death: it is the same process, and knows that it did not run."""
    service = start_fresh(watchdog_s="20")
    os.kill(service.child_pid, signal.SIGSTOP)
    stopped_at = time.monotonic()
    while time.monotonic() - stopped_at < 1.0:
        os.sched_yield()
    os.kill(service.child_pid, signal.SIGCONT)
    stall = service.wait_for("the process did not run, deadlines are put off")
    assert 0.8 < stall["stalled_s"] < 5
    info = server_info(service)
    assert (info.restart_count, info.stall_count) == (0, 1)
    assert info.stall_time.ToTimedelta().total_seconds() == pytest.approx(stall["stalled_s"], abs=0.01)


def test_a_restart_that_cannot_start_is_tried_again(start_fresh: StartService) -> None:
    """Ever more slowly, and what is kept stays kept meanwhile: here the port of this life is taken for a while."""
    service = start_fresh(listen="127.0.0.1:0")
    ready = service.wait_for("ready")
    port = int(ready["listen"].rpartition(":")[2])
    command = [sys.executable, "-c", TAKE, str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as taker:
        assert taker.stdout is not None
        assert taker.stdout.readline() == "waits\n"
        service.kill_child()
        assert taker.stdout.readline() == "taken\n"
        service.wait_for("service process ended", 3)
    assert service.wait_for("ready", 2)["epoch"] == ready["epoch"]
    pauses = [entry["restart_pause_s"] for entry in service.entries("service process ended")]
    assert pauses[0] == 0.0
    assert pauses[1:3] == [0.1, 0.2]


TAKE = """
import socket, sys
print("waits", flush=True)
while True:
    try:
        taken = socket.create_server(("127.0.0.1", int(sys.argv[1])))
    except OSError:
        continue
    break
print("taken", flush=True)
sys.stdin.read()
"""


def test_signals_to_the_child_are_the_supervisors_affair(service: ServiceProcess) -> None:
    """A terminal and systemd send theirs to every process of a group: they mean what they mean to the supervisor."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(service.child_pid, number)
    assert server_info(service).restart_count == 0
    assert service.entries("draining") == []


def test_what_breaks_its_process_again_and_again_is_dropped(service: ServiceProcess) -> None:
    """A crash may come of what is kept: after three without a minute of service between, the start is cold."""
    epoch = service.wait_for("ready")["epoch"]
    with RawCaller(str(service.socket)) as caller:
        caller.open_pool("p")
    for count in range(1, 4):
        os.kill(service.child_pid, signal.SIGSEGV)
        ready = service.wait_for("ready", count + 1)
        assert (ready["epoch"] == epoch) == (count < 3)
    assert [entry["cause"] for entry in service.entries("service process ended")] == ["broken"] * 3
    assert len(service.entries("pool recovered")) == 2
    assert (
        len(service.entries("service process broke again and again: what it left is dropped, the next start is cold"))
        == 1
    )
    assert ready["restart_count"] == 0
