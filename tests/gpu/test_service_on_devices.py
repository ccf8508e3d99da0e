"""A service with pools on a device, and workers in processes of their own: who sees what, and who survives whom."""

import os
import signal
import statistics
import time
from pathlib import Path

import pytest

from bench.figures import seconds
from conftest import StartService
from gpu.conftest import Place, StartWorker
from integration.client_kinds import after_epochs
from kvharbor.client import connect
from kvharbor.gpumem import DataType, Layout, Plane, device_of
from kvharbor.gpumem.devices import memory_of
from raw_caller import greeted, hello
from service_process import ServiceProcess
from waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

GRACE_S = 1.0
PROMPT = list(range(40))
STAMPS = [float(token) for token in range(1, 41)]


@pytest.fixture(scope="module")
def service(start_here: StartService) -> ServiceProcess:
    """For tests that leave it running."""
    return start_here(device_grace_s=str(GRACE_S))


@pytest.fixture
def pool_name(request: pytest.FixtureRequest) -> str:
    """A pool of the test's own."""
    return str(request.function.__name__)[-64:]


def test_what_one_worker_has_written_another_reads(
    service: ServiceProcess, pool_name: str, start_worker: StartWorker
) -> None:
    """C14: the commit has waited for the kernels that wrote, which nobody else knows."""
    writer, reader = start_worker(service, pool_name), start_worker(service, pool_name)
    writer.put(PROMPT, STAMPS)
    found = reader.allocate("mine", PROMPT)
    assert found.cached_tokens == 32
    assert reader.read("mine", 0, 32) == STAMPS[:32]


def test_a_forks_child_has_a_copy_of_the_tail(
    service: ServiceProcess, pool_name: str, start_worker: StartWorker
) -> None:
    """The service copies on the device what the parent's kernels have written, and the two go on apart."""
    worker = start_worker(service, pool_name)
    parent = worker.allocate("parent", PROMPT)
    worker.stamp("parent", 0, STAMPS)
    worker.commit("parent", len(PROMPT))
    (child,) = worker.fork("parent", ["child"])
    assert (child.table[:2], child.table[2] != parent.table[2]) == (parent.table[:2], True)
    assert worker.read("child", 0, len(PROMPT)) == STAMPS
    worker.extend("child", 1)
    worker.stamp("child", 40, [99.0])
    worker.commit("child", 41, [7])
    worker.extend("parent", 1)
    worker.stamp("parent", 40, [11.0])
    assert (worker.read("child", 40, 41), worker.read("parent", 40, 41)) == ([99.0], [11.0])


def test_a_killed_workers_kernels_stop_before_its_blocks_are_given_away(
    service: ServiceProcess, pool_name: str, start_worker: StartWorker
) -> None:
    """G3: quiet is proved, a grace goes by, and then the blocks are free; those who go on notice nothing."""
    victim, other = start_worker(service, pool_name), start_worker(service, pool_name)
    other.put(PROMPT, STAMPS)
    victim.allocate("held", range(100, 148))
    victim.keep_storing()
    free = other.free_block_count()
    killed_at = time.monotonic()
    victim.kill()
    until(other.free_block_count, lambda now: now == free + 3)
    assert time.monotonic() - killed_at >= GRACE_S
    found = other.allocate("again", PROMPT)
    assert (found.cached_tokens, other.read("again", 0, 32)) == (32, STAMPS[:32])


def test_e7_a_client_that_dies_at_work_on_the_device_stops_nobody(
    service: ServiceProcess, pool_name: str, start_worker: StartWorker
) -> None:
    """E7: while its context is torn down others allocate in less than 200 ms (p99), and a new one says hello in 1 s."""
    victim, other = start_worker(service, pool_name), start_worker(service, pool_name)
    free = other.free_block_count()
    victim.allocate("held", range(100, 132))
    victim.keep_storing()
    os.kill(victim.process.pid, signal.SIGKILL)
    assert seconds(lambda: register(service)) < 1
    took_s: list[float] = []

    def all_given_back() -> bool:
        took_s.append(seconds(lambda: other.allocate("one", range(16))))
        other.release("one")
        return bool(other.free_block_count() == free)

    until(all_given_back)
    assert len(took_s) > 20
    assert statistics.quantiles(took_s, n=100, method="inclusive")[98] < 0.2
    victim.kill()


def register(service: ServiceProcess) -> None:
    """A new client says hello and leaves."""
    side, answer = greeted(str(service.socket), hello())
    side.close()
    assert answer.HasField("welcome")


def test_f5_a_worker_finds_the_device_by_its_uuid(
    place: Place,
    service: ServiceProcess,
    pool_name: str,
    start_worker: StartWorker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """F5: it may be the only one that a worker sees, or the last; it is always the same card."""
    writer = start_worker(service, pool_name)
    writer.put(PROMPT, STAMPS)
    uuid, _ = writer.device()
    for visible in (uuid, ",".join([*(other for other in place.cuda.devices if other != uuid), uuid])):
        with monkeypatch.context() as changed:
            changed.setenv("CUDA_VISIBLE_DEVICES", visible)
            reader = start_worker(service, pool_name)
            reader.allocate("mine", PROMPT)
        assert reader.device() == (uuid, visible.count(","))
        assert reader.read("mine", 0, 32) == STAMPS[:32]


def test_memory_stays_through_the_services_process(place: Place, tmp_path: Path, start_worker: StartWorker) -> None:
    """kill -9 of the process that serves: nothing is lost, nothing moves, and the next one makes copies too."""
    with started(place, tmp_path) as service:
        worker = start_worker(service, "p")
        worker.allocate("held", PROMPT)
        worker.stamp("held", 0, STAMPS)
        worker.commit("held", len(PROMPT))
        before = worker.place()
        service.restart_child()
        worker.fork("held", ["child"])
        assert worker.place() == before
        assert worker.read("child", 0, len(PROMPT)) == STAMPS
        reader = start_worker(service, "p")
        reader.allocate("mine", PROMPT)
        assert reader.read("mine", 0, 32) == STAMPS[:32]
        service.stop()


def test_a_new_epoch_has_memory_of_its_own(place: Place, tmp_path: Path, start_worker: StartWorker) -> None:
    """kill -9 of the supervisor. vmm: the views that were there show it; ipc: the worker is told to take new ones."""
    with started(place, tmp_path) as service:
        worker = start_worker(service, "p")
        worker.put(PROMPT, STAMPS)
        address, _, _ = worker.place()
        if place.arena == "cuda_vmm":
            worker.keep_view()
        service.kill()
    with started(place, tmp_path) as service:
        after_epochs(worker.free_block_count)
        here, epoch_count, moved_count = worker.place()
        if place.arena == "cuda_vmm":
            assert (here, epoch_count, moved_count) == (address, 1, 0)
        else:
            assert (epoch_count, moved_count) == (1, 1)
        worker.put(PROMPT, STAMPS[::-1])
        reader = start_worker(service, "p")
        found = reader.allocate("mine", PROMPT)
        assert found.cached_tokens == 32
        if place.arena == "cuda_vmm":
            assert worker.seen_in_kept_view(found.table[0]) == STAMPS[-1]
        assert reader.read("mine", 0, 32) == STAMPS[::-1][:32]
        service.stop()


def test_without_its_keeper_the_memory_is_lost(place: Place, tmp_path: Path, start_worker: StartWorker) -> None:
    """kill -9 of the process that allocated: a new epoch begins, in which the worker goes on."""
    if place.arena == "cuda_vmm":
        pytest.skip("no process keeps the memory of cuda_vmm")
    with started(place, tmp_path) as service:
        worker = start_worker(service, "p")
        worker.put(PROMPT, STAMPS)
        os.kill(int(service.entries("keeper began")[-1]["pid"]), signal.SIGKILL)
        service.wait_for("ready", 2)
        after_epochs(worker.free_block_count)
        assert worker.allocate("again", PROMPT).cached_tokens == 0
        worker.stamp("again", 0, STAMPS)
        assert worker.read("again", 0, len(PROMPT)) == STAMPS
        service.stop()


def test_f6_a_pool_of_most_of_the_device_comes_again(place: Place, tmp_path: Path) -> None:
    """F6: beside the dead service's pool of 60 % there is no room for the next one until this worker lets go."""
    device = device_of(place.cuda.devices[0])
    block_bytes = (64 if place.on_hardware else 1) * 2**20
    size_bytes = int(0.6 * memory_of(device).free_bytes) // block_bytes * block_bytes
    layout = Layout("f6", 16, (Plane("whole", 1, DataType.UINT8, block_bytes, interior="opaque"),), scratch_blocks=0)
    with started(place, tmp_path, memory=f"{size_bytes}B") as service:
        harbor = connect(service.target, on_epoch=lambda *_: None)
        pool = harbor.open_pool("f6", layout, size_bytes)
        with pool.allocate(PROMPT) as sequence:
            sequence.commit(len(PROMPT))
        assert memory_of(device).free_bytes < size_bytes
        service.kill()
    with harbor, started(place, tmp_path, memory=f"{size_bytes}B") as service:
        stats = after_epochs(pool.stats)
        assert (stats.free_block_count, stats.cached_block_count) == (size_bytes // block_bytes, 0)
        assert [info.name for info in harbor.list_pools()] == ["f6"]
        harbor.close()
        service.stop()


def started(place: Place, folder: Path, **flags: str) -> ServiceProcess:
    """Starts a service for one test, always at the same socket, and waits until it is ready."""
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in place.flags(**flags).items()]
    service = ServiceProcess(folder / "kv.sock", *arguments, environment=place.cuda.environment)
    service.wait_for("ready")
    return service
