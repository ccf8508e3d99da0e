"""Python clients of a service whose pools lie on devices: the driver is the stub. Never run on hardware.

Where a kernel would write, the tests write by the driver. See tests/cuda_stub/README.md.
"""

import dataclasses
import queue
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

import cuda_stub
from conftest import StartService
from integration.client_kinds import Connect, after_epochs
from integration.client_worker import LAYOUT, pool_size
from kvharbor.client import PoolDevicesMismatch, PoolInUse, connect
from kvharbor.gpumem import driver
from kvharbor.gpumem.devices import current
from service_process import ServiceProcess

PARTED = dataclasses.replace(LAYOUT, tp_size=2)
PAGE_BYTES = LAYOUT.planes[0].page_bytes
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_here")]


@pytest.fixture(scope="module", params=["cuda_ipc", "cuda_vmm"])
def arena(request: pytest.FixtureRequest) -> str:
    """The kind of arena."""
    return str(request.param)


def start_on_devices(start: StartService, arena: str, devices: Sequence[str], **options: Any) -> ServiceProcess:
    """Starts a service with pools on both devices."""
    options = {"arena": arena, "cuda_runtime": "driver", "memory": "16MiB", **options}
    return start(environment=cuda_stub.environment(devices), **options)


@pytest.fixture(scope="module")
def shared(start_service: StartService, arena: str, stub_devices: tuple[str, str]) -> ServiceProcess:
    """A service for the tests of a kind that open pools of names of their own."""
    return start_on_devices(start_service, arena, stub_devices)


def write_page(memory: Any, layer: int, block: int, content: bytes) -> None:
    """Stores a page of K."""
    with current(memory.mapping.device):
        driver.write_bytes(memory.mapping.address + memory.descriptor.page_offset_bytes("k", layer, block), content)


def read_page(memory: Any, layer: int, block: int) -> bytes:
    """Returns a page of K."""
    with current(memory.mapping.device):
        first = memory.mapping.address + memory.descriptor.page_offset_bytes("k", layer, block)
        return driver.read_bytes(first, PAGE_BYTES)


def page(number: int) -> bytes:
    """The content of a page."""
    return bytes([number]) * PAGE_BYTES


READER = """
import sys
from kvharbor.client import connect
from integration.client_worker import LAYOUT
from integration.test_client_devices import read_page

with connect(sys.argv[1]) as harbor:
    pool = harbor.open_pool(sys.argv[2], LAYOUT)
    with pool.allocate(range(40)) as held:
        pages = [read_page(pool.memory, 1, int(block))[0] for block in held.table[: held.cached_tokens // 16]]
        print(held.cached_tokens, pages, pool.memory.mapping.device.ordinal)
"""


def run(script: str, service: ServiceProcess, pool_name: str, environment: dict[str, str]) -> str:
    """Runs a worker in another process; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{script}", service.target, pool_name],
        env={**environment, "KVHARBOR_CUDA_RUNTIME": "driver", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    return done.stdout


def test_what_one_worker_has_computed_another_reads(
    shared: ServiceProcess, pool_name: str, stub_devices: tuple[str, str]
) -> None:
    """F5: another process, to which the devices have other numbers, finds the prefix and its bytes."""
    with connect(shared.target) as harbor:
        pool = harbor.open_pool(pool_name, LAYOUT, pool_size(8), devices=[stub_devices[1]])
        with pool.allocate(range(40)) as held:
            for number, block in enumerate(held.table, start=1):
                write_page(pool.memory, 1, int(block), page(number))
            assert held.commit(40).committed_tokens == 32
        reversed_devices = cuda_stub.environment(stub_devices, visible=",".join(reversed(stub_devices)))
        assert run(READER, shared, pool_name, reversed_devices) == "32 [1, 2] 0\n"


def test_a_child_has_a_copy_of_its_parents_tail(open_harbor: Connect, shared: ServiceProcess, pool_name: str) -> None:
    """C14: fork waits for what the parent has launched, and the service copies after it."""
    pool = open_harbor(shared.target).open_pool(pool_name, LAYOUT, pool_size(8))
    with pool.allocate(range(24)) as parent:
        write_page(pool.memory, 0, int(parent.table[1]), page(7))
        parent.commit(24)
        (child,) = parent.fork(1)
        assert child.table[1] != parent.table[1]
        assert read_page(pool.memory, 0, int(child.table[1]))[: PAGE_BYTES // 2] == page(7)[: PAGE_BYTES // 2]
        child.release()


def test_each_rank_has_its_part_on_its_device(
    open_harbor: Connect, shared: ServiceProcess, pool_name: str, stub_devices: tuple[str, str]
) -> None:
    """C13: the same block, two places; the child's tail is copied in both."""
    leader = open_harbor(shared.target)
    pool = leader.open_pool(pool_name, PARTED, pool_size(8), devices=stub_devices)
    member = open_harbor(shared.target, join=leader.join_token, rank=1)
    memories = [pool.memory, member.attach_pool(pool.id)]
    assert [memory.mapping.device.uuid for memory in memories] == [*stub_devices]
    with pool.allocate(range(24)) as parent:
        for rank, memory in enumerate(memories, start=1):
            write_page(memory, 0, int(parent.table[1]), page(rank))
        parent.commit(24)
        (child,) = parent.fork(1)
        assert [read_page(memory, 0, int(child.table[1]))[0] for memory in memories] == [1, 2]
        child.release()


def test_a_pool_on_other_devices_is_not_the_one_asked_for(
    shared: ServiceProcess, pool_name: str, stub_devices: tuple[str, str]
) -> None:
    """It is refused with both places; whoever names none gets the one that is there."""
    with connect(shared.target) as first, connect(shared.target) as second:
        pool = first.open_pool(pool_name, LAYOUT, pool_size(8), devices=[stub_devices[0]])
        with pytest.raises(PoolDevicesMismatch) as error:
            second.open_pool(pool_name, LAYOUT, devices=[stub_devices[1]])
        assert error.value.metadata == {"devices": stub_devices[1], "currentDevices": stub_devices[0]}
        assert second.open_pool(pool_name, LAYOUT).id == pool.id
        places = {info.name: info.devices for info in second.list_pools()}
        assert places[pool_name] == (stub_devices[0],)
        assert [device.uuid for device in second.server_info().devices] == [*stub_devices]


ELSEWHERE = """
import sys
from kvharbor.client import DeviceNotVisible, connect
from integration.client_worker import LAYOUT

with connect(sys.argv[1]) as harbor:
    try:
        harbor.open_pool(sys.argv[2], LAYOUT)
    except DeviceNotVisible as refused:
        print(refused.metadata["device"], refused.metadata["visibleDevices"])
"""


def test_a_process_that_does_not_see_the_device_is_told_both(
    shared: ServiceProcess, pool_name: str, stub_devices: tuple[str, str]
) -> None:
    """F5: the third worker."""
    with connect(shared.target) as harbor:
        harbor.open_pool(pool_name, LAYOUT, pool_size(8), devices=[stub_devices[1]])
        said = run(ELSEWHERE, shared, pool_name, cuda_stub.environment(stub_devices, visible=stub_devices[0]))
    assert said.split() == [stub_devices[1], stub_devices[0]]


def test_a_pool_is_dropped_when_nobody_else_has_it(
    open_harbor: Connect, shared: ServiceProcess, pool_name: str
) -> None:
    """C16: refused, it is as it was; dropped, its memory can be had again."""
    harbor = open_harbor(shared.target)
    available_bytes = harbor.server_info().memory_available_bytes
    pool = harbor.open_pool(pool_name, LAYOUT, pool_size(8))
    assert harbor.server_info().memory_available_bytes <= available_bytes - pool.descriptor.size_bytes
    write_page(pool.memory, 0, 1, page(6))
    with connect(shared.target) as other:
        other.open_pool(pool_name, LAYOUT)
        with pytest.raises(PoolInUse):
            harbor.drop_pool(pool_name)
        assert read_page(pool.memory, 0, 1) == page(6)
        assert pool.stats().free_block_count == 8
    assert harbor.drop_pool(pool_name)
    assert harbor.server_info().memory_available_bytes == available_bytes
    assert not harbor.drop_pool(pool_name)


def test_memory_stays_through_the_services_process_and_comes_anew_in_a_new_epoch(
    open_harbor: Connect, start_fresh: StartService, arena: str, stub_devices: tuple[str, str]
) -> None:
    """C11, C12, C15: vmm at the same addresses; ipc perhaps at others, of which the engine is told first."""
    service, moved = start_on_devices(start_fresh, arena, stub_devices), queue.Queue[Any]()
    harbor = open_harbor(service.target, on_epoch=lambda *_: None, on_moved=lambda pool: moved.put(pool.views))
    pool = harbor.open_pool("p", LAYOUT, pool_size(8))
    address, views = pool.memory.mapping.address, pool.views
    with pool.allocate(range(16)) as held:
        block = int(held.table[0])
        write_page(pool.memory, 0, block, page(5))
        service.restart_child()
        assert pool.stats().sequence_count == 1
        with connect(service.target) as other:
            assert read_page(other.open_pool("p", LAYOUT).memory, 0, block) == page(5)
    service.kill()
    start_on_devices(start_fresh, arena, stub_devices, socket=service.socket)
    assert after_epochs(pool.stats).free_block_count == 8
    assert read_page(pool.memory, 0, block) == page(0)
    if pool.memory.moves:
        assert moved.get_nowait() is pool.views is not views
    else:
        assert (pool.memory.mapping.address, pool.views) == (address, views)
    assert moved.empty()
    write_page(pool.memory, 0, block, page(4))
    with connect(service.target) as other:
        assert read_page(other.open_pool("p", LAYOUT).memory, 0, block) == page(4)
