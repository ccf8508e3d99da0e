"""Case F6: workers still map the memory of a service that has died, and there is no room for the next one's beside it.

The services run in a small memory cgroup: a memfd's fallocate does not fail beyond its limit, the kernel kills.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from contract.leaks import mapped_arenas
from integration.client_kinds import after_epochs
from integration.client_worker import LAYOUT, WorkerProcess
from kvharbor.client import InsufficientMemory, connect
from memory_cgroup import Cgroup, memory_cgroup
from service_process import ServiceProcess

pytestmark = [pytest.mark.root, pytest.mark.slow]

MIB = 2**20
LIMIT_BYTES = 320 * MIB
POOL_BYTES = 160 * MIB
Start = Callable[..., ServiceProcess]
BLOCK_COUNT = POOL_BYTES // LAYOUT.block_bytes - LAYOUT.scratch_blocks


@pytest.fixture
def cgroup() -> Iterator[Cgroup]:
    """Room for one pool beside the service's processes, and not for two."""
    with memory_cgroup(LIMIT_BYTES) as made:
        yield made


@pytest.fixture
def start(cgroup: Cgroup, tmp_path: Path) -> Iterator[Start]:
    """Starts services in the cgroup, one after another at the same socket, and waits for what they say."""
    started: list[ServiceProcess] = []

    def start_next(*flags: str, until: str = "ready") -> ServiceProcess:
        started.append(ServiceProcess(tmp_path / "kv.sock", f"--memory={POOL_BYTES}B", *flags))
        cgroup.enter(started[-1].process.pid)
        started[-1].wait_for(until)
        return started[-1]

    yield start_next
    for service in started:
        if service.process.returncode is None:
            service.stop()
    assert cgroup.kill_count() == 0


def test_f6_the_next_service_starts_and_the_worker_lets_go(start: Start) -> None:
    """F6: the worker finds the new epoch and lets go of the old memory, so that its pool fits; there is one pool."""
    service = start()
    with connect(service.target, on_epoch=lambda *_: None) as harbor:
        pool = harbor.open_pool("f6", LAYOUT, POOL_BYTES)
        view = pool.views.numpy("k", 0)
        with pool.allocate(range(16)) as held:
            view[held.slots(0, 16)] = 7.0
            held.commit(16)
        service.kill()
        start()
        stats = after_epochs(pool.stats)
        assert (stats.total_bytes, stats.cached_block_count) == (BLOCK_COUNT * LAYOUT.block_bytes, 0)
        assert not np.any(view)
        assert len([line for line in mapped_arenas() if "kvharbor-f6" in line]) == 1
        del view


def test_f6_a_worker_that_never_lets_go_is_named(start: Start) -> None:
    """F6: the refusal says how much is held by which process; when that ends, the pool is made."""
    service = start()
    worker = WorkerProcess(service.target, "f6", BLOCK_COUNT)
    worker.allocate("x", range(16))
    service.kill()
    with connect(start().target) as harbor:
        with pytest.raises(InsufficientMemory, match="still map") as refused:
            harbor.open_pool("f6", LAYOUT, POOL_BYTES)
        metadata = refused.value.metadata
        # This process may map memory of other tests, as long as an array of theirs lives.
        assert share_of(worker, metadata["heldBy"]) == POOL_BYTES <= int(metadata["heldBytes"])
        assert int(metadata["neededBytes"]) > int(metadata["availableBytes"])
        worker.kill()
        assert harbor.open_pool("f6", LAYOUT, POOL_BYTES).stats().free_block_count == BLOCK_COUNT


def test_f6_a_declared_pool_waits_for_a_worker_that_lets_go_when_it_hears_of_the_new_epoch(
    start: Start, tmp_path: Path
) -> None:
    """F6: the service is not ready before it has the memory, the worker keeps that until the service has told it."""
    config = declaring(tmp_path)
    service = start(config)
    with connect(service.target, on_epoch=lambda *_: None) as harbor:
        pool = harbor.open_pool("f6", LAYOUT, POOL_BYTES)
        assert not pool.views.numpy("k", 0).any()
        service.kill()
        start(config)
        assert after_epochs(pool.stats).total_bytes == BLOCK_COUNT * LAYOUT.block_bytes


def test_f6_a_declared_pool_waits_for_a_worker_to_end(start: Start, tmp_path: Path) -> None:
    """F6: one that never lets go is named, and is not waited for any more when it is gone."""
    config = declaring(tmp_path)
    service = start(config)
    worker = WorkerProcess(service.target, "f6", BLOCK_COUNT)
    worker.allocate("x", range(16))
    service.kill()
    waits = "declared pool waits for memory that workers of an earlier epoch may have"
    following = start(config, until=waits)
    (told,) = following.entries(waits)
    assert share_of(worker, told["held_by"]) == POOL_BYTES <= told["held_bytes"]
    worker.kill()
    following.wait_for("ready")


def share_of(worker: WorkerProcess, held_by: str) -> int:
    """Returns the bytes that a worker is said to map."""
    shares = dict(share.split(": ") for share in held_by.split(", "))
    return int(shares[str(worker.process.pid)].split()[0])


def declaring(folder: Path) -> str:
    """Returns the flag for a file that declares the pool of these tests."""
    planes = ", ".join(
        f'{{name = "{plane.name}", layer_count = {plane.layer_count}, data_type = "{plane.data_type.value}", '
        f"head_count = {plane.head_count}, head_dim = {plane.head_dim}}}"
        for plane in LAYOUT.planes
    )
    file = folder / "kvharbor.toml"
    file.write_text(
        f'[pools.f6]\nsize = "{POOL_BYTES}B"\n[pools.f6.layout]\nmodel = "{LAYOUT.model}"\n'
        f"block_tokens = {LAYOUT.block_tokens}\nplanes = [{planes}]\n"
    )
    return f"--config={file}"
