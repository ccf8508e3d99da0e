"""Pools on devices, on the stub of the driver: both arenas, and the death of everybody who has a part in them."""

import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType

import pytest

import cuda_stub
from conftest import StartService
from kvharbor.v1 import cache_service_pb2 as cache
from kvharbor.v1 import errors_pb2
from kvharbor.v1 import pool_service_pb2 as pools
from raw_caller import BLOCK_BYTES, RawCaller, greeted, refused, resuming, small_layout
from service_process import ServiceProcess, failed_start
from session_worker import SessionWorker
from waiting import until

KINDS = ("cuda_vmm", "cuda_ipc")
DEVICE_BYTES = 64 * 2**20

PREPARE = """
from device_memory import attached, view
from kvharbor.v1 import cache_service_pb2 as cache
os.environ["KVHARBOR_CUDA_RUNTIME"] = "driver"

def fork(one):
    asked = cache.ForkRequest(pool_id=pool_id, sequence_id=one.sequence_id, child_count=1)
    return caller.call(caller.cache.Fork, asked).children[0]

def blocks(sequence):
    return [*memoryview(sequence.table.block_ids).cast("I")]
"""
OPEN = "pool_id = caller.open_pool('p', block_count=8); memory = attached(caller.side, pool_id)"
WRITE = "memory.write(block, bytes.fromhex(content))"
READ = "result = memory.read(block).hex()"

StartOnDevices = Callable[..., ServiceProcess]


@pytest.fixture
def start(start_fresh: StartService) -> StartOnDevices:
    """Starts a service of the arena `kind` on devices of the stub. `faults` are the stub's; the rest are flags."""

    def started(
        kind: str, devices: list[str], /, *, faults: Mapping[str, str] = MappingProxyType({}), **flags: str
    ) -> ServiceProcess:
        flags = {"arena": kind, "cuda_runtime": "driver", "memory": "32MiB", **flags}
        return start_fresh(environment={**on_stub(devices), **faults}, **flags)

    return started


@pytest.fixture
def device() -> str:
    """A device of its own."""
    return cuda_stub.new_uuid()


def on_stub(devices: Sequence[str], visible: str | None = None) -> dict[str, str]:
    """Returns the environment of a process on the stub with these devices, of which it sees `visible`."""
    return cuda_stub.environment(devices, device_bytes=DEVICE_BYTES, visible=visible)


def worker_on(service: ServiceProcess, devices: Sequence[str], visible: str | None = None) -> SessionWorker:
    """Returns a worker on the stub with these devices, of which it sees `visible`."""
    worker = SessionWorker(service.socket, environment=on_stub(devices, visible))
    worker.run(PREPARE)
    return worker


def come_back(caller: RawCaller, pool_id: str) -> None:
    """Goes on with a session that holds nothing, after the service's process was replaced."""
    caller.resume()
    caller.resume_pool(pool_id)


def keeper_pid(service: ServiceProcess) -> int:
    """Returns the process that keeps the memory of the service's one device."""
    return int(service.entries("keeper began")[-1]["pid"])


def maker_pid(service: ServiceProcess, device: str) -> int:
    """Returns the process of a service that has memory of the device; 0 while none has."""
    supervisor = service.process.pid
    for pid in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split():
        with contextlib.suppress(OSError):
            if any(f"kvstub-{device}" in str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir()):
                return int(pid)
    return 0


def is_gone(pid: int) -> bool:
    """Tells whether a process has ended, waited for or not."""
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def info(caller: RawCaller) -> pools.GetServerInfoResponse:
    """Returns what the service says of itself."""
    response: pools.GetServerInfoResponse = caller.call(caller.pools.GetServerInfo, pools.GetServerInfoRequest())
    return response


def opening(name: str, size_bytes: int = 0, tp_size: int = 1, devices: Sequence[str] = ()) -> pools.OpenPoolRequest:
    """Returns the request for a pool."""
    layout = small_layout(tp_size=tp_size)
    return pools.OpenPoolRequest(name=name, layout=layout, size_bytes=size_bytes, devices=devices)


def devices_of(caller: RawCaller, request: pools.OpenPoolRequest) -> list[str]:
    """Opens a pool; returns where its parts lie."""
    return [part.device for part in caller.call(caller.pools.OpenPool, request).pool.parts]


def ready(service: ServiceProcess) -> ServiceProcess:
    """Returns a service when it is ready."""
    service.wait_for("ready")
    return service


def content(number: int) -> str:
    """Bytes of a block, in hexadecimal."""
    return (bytes([number]) * BLOCK_BYTES).hex()


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_worker_has_written_survives_the_services_process(kind: str, device: str, start: StartOnDevices) -> None:
    """Through forks, whose copies the service makes before its death and after, byte for byte."""
    service = start(kind, [device])
    with worker_on(service, [device]) as worker:
        worker.run(OPEN)
        full, tail = worker.run("one = caller.allocate(pool_id, *range(20)); result = blocks(one)")
        for block in (full, tail):
            worker.run(WRITE, block=block, content=content(block + 1))
        worker.run("caller.commit(pool_id, one.sequence_id, 20)")
        copies = [worker.run("child = fork(one); result = blocks(child)")[1]]
        service.restart_child()
        worker.run(
            "caller.resume()\n"
            "cursors = dict(committed_tokens=16, tail=raw.tokens(*range(16, 20)), computed_tokens=20)\n"
            "held = [raw.held_sequence(each, **cursors) for each in (one, child)]\n"
            "one = caller.resume_pool(pool_id, *held).results[0].sequence\n"
        )
        copies.append(worker.run("result = blocks(fork(one))")[1])
        assert len({tail, *copies}) == 3
        assert worker.run(READ, block=full) == content(full + 1)
        for block in (tail, *copies):
            assert worker.run(READ, block=block) == content(tail + 1)
        worker.run("memory.mapped.close()")


def test_a_keeper_outlives_the_services_process_and_frees_what_is_dropped(device: str, start: StartOnDevices) -> None:
    """Most of the device can be had again after each drop, by this process and those after it, killed or upgraded."""
    service = start("cuda_ipc", [device], memory="60MiB")
    most_bytes = 40 * 2**20
    with RawCaller(str(service.socket)) as caller:
        for name in ("a", "b"):
            pool_id = caller.call(caller.pools.OpenPool, opening(name, most_bytes)).pool.pool_id
            assert info(caller).memory_available_bytes < most_bytes
            caller.call(caller.pools.DropPool, pools.DropPoolRequest(pool_id=pool_id))
        kept = caller.call(caller.pools.OpenPool, opening("kept", most_bytes)).pool
        service.restart_child()
        come_back(caller, kept.pool_id)
        service.process.send_signal(signal.SIGHUP)
        service.wait_for("ready", 3)
        come_back(caller, kept.pool_id)
        caller.call(caller.pools.DropPool, pools.DropPoolRequest(pool_id=kept.pool_id))
        assert devices_of(caller, opening("c", most_bytes)) == [device]
    assert len(service.entries("keeper began")) == 1
    assert not is_gone(keeper_pid(service))


def test_without_its_keeper_the_memory_is_lost_and_the_epoch_ends(device: str, start: StartOnDevices) -> None:
    """The next process begins anew, with a keeper of its own; engines are told that their handles are of the past."""
    service = start("cuda_ipc", [device])
    with worker_on(service, [device]) as worker:
        epoch, token = worker.run(OPEN + "; result = [caller.welcome.epoch, caller.welcome.session_token]")
        os.kill(keeper_pid(service), signal.SIGKILL)
        lost = service.wait_for("the memory of pools is lost, the next start is cold")
        assert device in lost["cause"]
        ready = service.wait_for("ready", 2)
        assert (ready["epoch"] == epoch, ready["restart_count"]) == (False, 0)
        side, response = greeted(str(service.socket), resuming(token, epoch))
        side.close()
        assert response.refused.reason == errors_pb2.ERROR_REASON_STALE_EPOCH
        worker.run("memory.mapped.close(); caller.abandon(); caller = raw.RawCaller(path)")
        worker.run(OPEN + "; memory.write(1, bytes.fromhex(content))", content=content(7))
        assert worker.run(READ, block=1) == content(7)


@pytest.mark.parametrize("end", [ServiceProcess.kill, ServiceProcess.stop])
def test_a_keeper_ends_with_its_supervisor(
    end: Callable[[ServiceProcess], object], device: str, start: StartOnDevices
) -> None:
    """However that ends: nothing is left that holds memory of the device."""
    service = start("cuda_ipc", [device])
    pid = keeper_pid(service)
    end(service)
    until(lambda: is_gone(pid), bool)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_the_device_has_not_is_refused_and_breaks_nothing(
    kind: str, device: str, start: StartOnDevices
) -> None:
    """Somebody else has it: the refusal says so, and a later try finds it."""
    service = start(kind, [device], memory="60MiB")
    with worker_on(service, [device]) as other, RawCaller(str(service.socket)) as caller:
        other.run(
            "from kvharbor.gpumem import driver, visible_devices\nfrom kvharbor.gpumem.devices import current\n"
            "with current(visible_devices()[0]): taken = driver.mem_alloc(40 * 2**20)"
        )
        with refused() as found:
            caller.call(caller.pools.OpenPool, opening("p", 40 * 2**20))
        assert (found[0].reason, found[0].metadata["limitedBy"]) == ("INSUFFICIENT_MEMORY", f"device {device}")
        assert "earlier epoch" in found[0].message
        assert info(caller).memory_available_bytes == 60 * 2**20
        other.run("with current(visible_devices()[0]): driver.mem_free(taken)")
        assert devices_of(caller, opening("p", 40 * 2**20)) == [device]
    assert not service.entries("service process ended")


def test_pools_lie_on_the_devices_that_are_named_or_where_most_room_is(start: StartOnDevices) -> None:
    """Each device has a budget of its own; a pool that is there lies where it lies."""
    first, second = devices = [cuda_stub.new_uuid() for _ in range(2)]
    service = start("cuda_vmm", devices)
    with RawCaller(str(service.socket)) as caller:
        assert devices_of(caller, opening("a", 8 * 2**20, devices=[second])) == [second]
        assert devices_of(caller, opening("b", 4 * 2**20)) == [first]
        assert devices_of(caller, opening("c", 2**20, tp_size=3)) == [first, second, first]
        assert [(each.uuid, each.memory_bytes) for each in info(caller).devices] == [
            (uuid, 32 * 2**20) for uuid in devices
        ]
        available = [each.memory_available_bytes for each in info(caller).devices]
        assert available == [(32 - 4 - 2) * 2**20, (32 - 8 - 1) * 2**20]
        assert (info(caller).memory_bytes, info(caller).memory_available_bytes) == (64 * 2**20, sum(available))
        for request, reason in (
            (opening("a", devices=[first]), "POOL_DEVICES_MISMATCH"),
            (opening("d", devices=[first, second]), "INVALID_FIELD"),
            (opening("d", devices=[cuda_stub.new_uuid()]), "INVALID_FIELD"),
            (opening("d", 30 * 2**20, devices=[first]), "INSUFFICIENT_MEMORY"),
        ):
            with refused() as found:
                caller.call(caller.pools.OpenPool, request)
            assert found[0].reason == reason
        assert devices_of(caller, opening("a", devices=[second])) == [second]


def test_a_uuid_is_one_devices_in_any_spelling(device: str, start: StartOnDevices) -> None:
    """Other tools write other cases: in a setting and in a request."""
    spelled = device[:4] + device[4:].upper()
    service = start("cuda_vmm", [device], devices=spelled)
    with RawCaller(str(service.socket)) as caller:
        assert [each.uuid for each in info(caller).devices] == [device]
        for _ in range(2):
            assert devices_of(caller, opening("p", 2**20, devices=[spelled])) == [device]


@pytest.mark.parametrize("kind", KINDS)
def test_pools_have_the_pieces_that_the_memory_comes_in(kind: str, device: str, start: StartOnDevices) -> None:
    """S8: a small pool takes a whole piece of 2 MiB, which no other has; the next process counts it too."""
    service = start(kind, [device], faults={"KVSTUB_GRANULARITY": str(2 * 2**20)}, memory="5MiB")
    with RawCaller(str(service.socket)) as caller:
        first = caller.call(caller.pools.OpenPool, opening("a", 2 * BLOCK_BYTES)).pool
        assert info(caller).memory_available_bytes == 3 * 2**20
        service.restart_child()
        come_back(caller, first.pool_id)
        rest = caller.call(caller.pools.OpenPool, opening("rest")).pool
        assert rest.size_bytes == 2 * 2**20
        with refused() as found:
            caller.call(caller.pools.OpenPool, opening("more", 2 * BLOCK_BYTES))
        assert (found[0].reason, found[0].metadata["availableBytes"]) == ("INSUFFICIENT_MEMORY", str(2**20))
        for each in (first, rest):
            caller.call(caller.pools.DropPool, pools.DropPoolRequest(pool_id=each.pool_id))
        assert info(caller).memory_available_bytes == 5 * 2**20


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_map_their_parts_by_uuid_whatever_their_ordinals_are(kind: str, start: StartOnDevices) -> None:
    """F5: one sees only the second device, as its first; one sees both the other way round; one sees the wrong one."""
    first, second = devices = [cuda_stub.new_uuid() for _ in range(2)]
    service = start(kind, devices)
    reads = "result = attached(caller.side, pool_id, part).read(1).hex()"
    with (
        worker_on(service, devices, visible="1") as only,
        worker_on(service, devices, visible="1,0") as reverse,
        worker_on(service, devices, visible="0") as wrong,
        RawCaller(str(service.socket)) as caller,
    ):
        request = opening("tp", 9 * BLOCK_BYTES, tp_size=2, devices=devices)
        pool_id = caller.call(caller.pools.OpenPool, request).pool.pool_id
        layout = "raw.small_layout(tp_size=2)"
        for worker in (only, reverse, wrong):
            worker.run(f"pool_id = caller.open_pool('tp', block_count=8, layout={layout})")
        for part in (0, 1):
            stamp = "attached(caller.side, pool_id, part).write(1, bytes.fromhex(content))"
            reverse.run(stamp, part=part, content=content(part + 1))
        assert only.run(reads, part=1) == content(2)
        assert [reverse.run(reads, part=part) for part in (0, 1)] == [content(1), content(2)]
        asked = "answer = raw.ask(caller.side, raw.attaching(pool_id, part=1, device_view=view()))[0]"
        told = wrong.run(f"{asked}; result = [answer.refused.reason, dict(answer.refused.metadata)]")
        assert told[0] == errors_pb2.ERROR_REASON_DEVICE_NOT_VISIBLE
        assert (told[1]["device"], told[1]["visibleDevices"]) == (second, first)
        response, fds = caller.attach(pool_id)
        assert (response.refused.metadata["visibleDevices"], fds) == ("none", [])


@pytest.mark.parametrize("allowed", ["false", "true"])
def test_clients_of_mps_are_refused_unless_they_are_allowed(allowed: str, device: str, start: StartOnDevices) -> None:
    """Their death would not prove that their kernels have stopped."""
    service = start("cuda_vmm", [device], allow_mps=allowed)
    with worker_on(service, [device]) as worker:
        worker.run("pool_id = caller.open_pool('p', block_count=8)")
        asked = "answer, fds = raw.ask(caller.side, raw.attaching(pool_id, device_view=view(mps_client=True)))"
        reason, metadata = worker.run(f"{asked}; result = [answer.refused.reason, dict(answer.refused.metadata)]")
    if allowed == "true":
        assert (reason, metadata) == (0, {})
    else:
        assert (reason, metadata["device"]) == (errors_pb2.ERROR_REASON_MPS_CLIENT_REFUSED, device)
        assert "allow_mps" in metadata["remedy"]


def test_blocks_of_a_dead_worker_wait_for_the_devices_grace(device: str, start: StartOnDevices) -> None:
    """What it had queued on the device may still run when the process is gone."""
    grace_s = 1.0
    service = start("cuda_vmm", [device], device_grace_s=str(grace_s))
    with worker_on(service, [device]) as worker:
        worker.run(OPEN + "; one = caller.allocate(pool_id, *range(20))")
        worker.kill()
        quarantined, ended = (service.wait_for(event)["timestamp"] for event in ("blocks quarantined", "session ended"))
    waited = datetime.fromisoformat(ended) - datetime.fromisoformat(quarantined)
    assert grace_s <= waited.total_seconds() + 0.05 < grace_s + 2


def test_a_device_that_fails_ends_the_process_and_the_next_goes_on(device: str, tmp_path: Path) -> None:
    """What the device holds is not known to this process any more; to the workers it is."""
    # Its log has a traceback in the end, which a service of the fixture's must not.
    environment = {**on_stub([device]), "KVSTUB_FAIL": "cuMemcpy2DAsync:1"}
    with (
        ServiceProcess(tmp_path / "kv.sock", "--arena=cuda_vmm", "--memory=32MiB", environment=environment) as service,
        worker_on(ready(service), [device]) as worker,
    ):
        worker.run(OPEN)
        (block,) = worker.run("one = caller.allocate(pool_id, *range(10)); result = blocks(one)")
        worker.run(WRITE, block=block, content=content(9))
        worker.run("caller.commit(pool_id, one.sequence_id, 10)")
        worker.run("import contextlib, grpc\nwith contextlib.suppress(grpc.RpcError): fork(one)")
        ended = service.wait_for("service process ended")
        assert (ended["cause"], ended["status"]) == ("broken", 70)
        service.wait_for("ready", 2)
        worker.run(
            "caller.resume()\n"
            "cursors = dict(tail=raw.tokens(*range(10)), computed_tokens=10)\n"
            "resumed = caller.resume_pool(pool_id, raw.held_sequence(one, **cursors))\n"
            "result = blocks(resumed.results[0].sequence)"
        )
        assert worker.run(READ, block=block) == content(9)


def test_a_death_on_the_way_does_not_replace_the_trial_of_the_arena(device: str, tmp_path: Path) -> None:
    """Nobody may rely on memory that was never shared: the process after goes on with the life, and tries it out."""
    slow = tmp_path / "slow"
    slow.touch()
    environment = {**on_stub([device]), "KVSTUB_SLOW": f"cuMemExportToShareableHandle:30:{slow}"}
    with ServiceProcess(tmp_path / "kv.sock", "--arena=cuda_vmm", "--memory=32MiB", environment=environment) as service:
        os.kill(until(lambda: maker_pid(service, device)), signal.SIGKILL)
        slow.unlink()
        assert service.wait_for("ready")["restart_count"] == 1
        assert len(service.entries("arena tried out")) == 1
        assert service.stop() == 0


def test_a_fork_without_room_for_its_copy_is_refused(device: str, start: StartOnDevices) -> None:
    """The service makes its context with the first copy, and the device may be full by then: that breaks nothing."""
    # Its third one, after those of the start.
    service = start("cuda_ipc", [device], faults={"KVSTUB_FAIL": "cuDevicePrimaryCtxRetain:3:2"})
    with RawCaller(str(service.socket)) as caller:
        pool_id = caller.open_pool("p", block_count=2)
        sequence = caller.allocate(pool_id, *range(10))
        caller.commit(pool_id, sequence.sequence_id, 10)
        for _ in range(2):
            asked = cache.ForkRequest(pool_id=pool_id, sequence_id=sequence.sequence_id, child_count=1)
            with refused() as found:
                caller.call(caller.cache.Fork, asked)
            assert found[0].reason == "INSUFFICIENT_MEMORY"
            assert "the service's own context" in found[0].message
        assert caller.stats(pool_id).free_block_count == 1
    assert not service.entries("service process ended")


UNLISTED = ("cuDeviceGetUuid", "cuDeviceGetCount")
"""Where these fail, no device has a name."""


@pytest.mark.parametrize(
    ("faults", "flags", "words"),
    [
        ({"KVSTUB_DEVICES": ""}, [], ["setting arena (cuda_vmm)", "kvharbor doctor"]),
        ({}, ["--devices=GPU-00000000-0000-0000-0000-000000000001"], ["GPU-00000000-0000-0000-0000-000000000001"]),
        ({}, ["--memory=65MiB"], ["setting memory", str(DEVICE_BYTES)]),
        ({"KVSTUB_MPS": "1"}, [], ["setting allow_mps"]),
        ({"KVSTUB_FAIL": "cuMemExportToShareableHandle:1"}, [], ["setting arena", "cuda_vmm"]),
        ({"KVSTUB_FAIL": "cuMemGetInfo:1"}, [], ["setting devices", "cuMemGetInfo"]),
        ({"KVSTUB_FAIL": "cuDeviceGetAttribute:1"}, [], ["setting devices", "cuDeviceGetAttribute"]),
        ({"KVSTUB_FAIL": "cuDeviceGetUuid:1"}, [], ["setting arena", "cuDeviceGetUuid", "kvharbor doctor"]),
        ({"KVSTUB_FAIL": "cuDeviceGetCount:1"}, [], ["setting arena", "cuDeviceGetCount", "kvharbor doctor"]),
        (
            {"KVSTUB_FAIL": "cuIpcGetMemHandle:1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            ["--arena=cuda_ipc", "--cuda-runtime=driver"],
            ["setting arena", "cuIpcGetMemHandle", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"],
        ),
        ({}, ["--arena=cuda_ipc"], ["setting arena", "CuPy"]),
    ],
)
def test_a_start_that_cannot_be_says_why(
    faults: dict[str, str], flags: list[str], words: list[str], device: str, tmp_path: Path
) -> None:
    """In one line, before anything is ready: no device, not that one, too little on it, MPS, no memory to share."""
    environment = {**on_stub([device]), **faults}
    line = failed_start(
        tmp_path / "kv.sock", "--arena=cuda_vmm", *flags, within_s=20.0, environment=environment, most_tries=1
    )
    assert [word for word in words if word not in line] == []
    names_no_device = "KVSTUB_DEVICES" in faults or faults.get("KVSTUB_FAIL", "").startswith(UNLISTED)
    assert device in line or names_no_device
