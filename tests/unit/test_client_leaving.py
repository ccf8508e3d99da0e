"""Dropping a pool on a device, and leaving: the memory goes first. The driver is the stub, the service a fake.

Never run on hardware: see tests/cuda_stub/README.md.
"""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cuda_stub
from fake_on_devices import read, write
from fake_service import DEADLINE_S, FakeService, MakeArena
from integration.client_kinds import Connect
from integration.client_worker import LAYOUT
from ipc_owner import IpcOwner, OwnedArena
from kvharbor.client import DeadlineExceeded, HarborClosed, PoolInUse, StateRefused, connect
from kvharbor.gpumem import ArenaClosed, VmmArena, device_of
from moments import hurried

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_here")]


@pytest.fixture(params=["cuda_ipc", "cuda_vmm"])
def arena(request: pytest.FixtureRequest) -> str:
    """The kind of arena; a test that is about one of them has it as a parameter."""
    return str(request.param)


@pytest.fixture
def service(arena: str, ipc_owner: IpcOwner, stub_devices: tuple[str, str], tmp_path: Path) -> Iterator[FakeService]:
    """A fake whose pool lies on a device."""
    device = stub_devices[0]
    kinds: dict[str, MakeArena] = {
        "cuda_ipc": lambda size_bytes, _: OwnedArena(ipc_owner, ipc_owner.create(size_bytes, device)),
        "cuda_vmm": lambda size_bytes, _: VmmArena.create(size_bytes, device_of(device)),
    }
    fake = FakeService(tmp_path, LAYOUT, 8, kinds[arena])
    yield fake
    fake.close()


class Watcher:
    """Counts what the driver has of this process when a call arrives at the service."""

    def __init__(self, service: FakeService, method: str, nothing_here: int) -> None:
        self.counts: list[int] = []
        service.before[method] = lambda: self.counts.append(cuda_stub.live_count() - nothing_here)


def test_a_dropped_pool_is_let_go_before_the_service_is_told(
    open_harbor: Connect, service: FakeService, arena: str, nothing_here: int
) -> None:
    """C16: nothing of it is mapped when DropPool arrives; of cuda_vmm the addresses are kept until the answer."""
    harbor = open_harbor(service.target)
    pool = harbor.open_pool("p", LAYOUT)
    dropping = Watcher(service, "DropPool", nothing_here)
    assert harbor.drop_pool("p")
    assert dropping.counts == [0 if arena == "cuda_ipc" else 1]
    assert cuda_stub.live_count() == nothing_here
    with pytest.raises(ArenaClosed):
        _ = pool.memory.mapping.address


def test_a_pool_that_is_not_dropped_is_there_again(open_harbor: Connect, service: FakeService, arena: str) -> None:
    """C16: in its place, or, where it moves, with new views of which the engine is told; it stays the harbor's."""
    moved: list[Any] = []
    harbor = open_harbor(service.target, on_moved=lambda pool: moved.append(pool.views))
    pool = harbor.open_pool("p", LAYOUT)
    address, views = pool.memory.mapping.address, pool.views
    write(pool.memory.mapping, b"kept")
    service.in_use = True
    with pytest.raises(PoolInUse):
        harbor.drop_pool("p")
    assert read(pool.memory.mapping, 4) == b"kept"
    if arena == "cuda_ipc":
        assert moved == [pool.views] != [views]
        with pytest.raises(ArenaClosed):
            views.page("k", 0, 0)
    else:
        assert (pool.memory.mapping.address, pool.views, moved) == (address, views, [])
    again = harbor.open_pool("p", LAYOUT)
    assert again.memory is pool.memory
    service.restart()
    assert pool.stats().pool_id == pool.id
    service.in_use = False
    assert harbor.drop_pool("p")


def test_a_pool_that_this_process_works_on_is_left_alone(open_harbor: Connect, service: FakeService) -> None:
    """C16: a kernel may be at work on the blocks of a sequence, so the memory stays and nothing is sent."""
    harbor = open_harbor(service.target)
    pool = harbor.open_pool("p", LAYOUT)
    views = pool.views
    with pool.allocate(range(16)):
        with pytest.raises(PoolInUse, match="1 sequences of this process") as error:
            harbor.drop_pool("p")
        assert error.value.metadata["sequenceCount"] == "1"
        write(pool.memory.mapping, b"here")
    assert (service.calls["DropPool"], pool.views) == ([], views)
    assert harbor.drop_pool("p")


@pytest.mark.parametrize("arena", ["cuda_ipc"], indirect=True)
def test_a_pool_with_arrays_over_it_is_not_dropped(open_harbor: Connect, service: FakeService) -> None:
    """C16: nothing is sent, the arrays stay good, and new ones can be taken; without them it is dropped."""
    harbor = open_harbor(service.target)
    pool = harbor.open_pool("p", LAYOUT)
    array = pool.views.page("k", 0, 0)
    with pytest.raises(StateRefused, match="drop every array, tensor and memoryview") as error:
        harbor.drop_pool("p")
    assert (error.value.reason, service.calls["DropPool"]) == ("MAPPING_IN_USE", [])
    write(pool.memory.mapping, b"here")
    del array
    array = pool.views.page("k", 0, 1)
    del array
    assert harbor.drop_pool("p")


def test_a_drop_without_an_answer_ends_the_pool_here(service: FakeService, nothing_here: int) -> None:
    """C16: nobody knows whether its memory is freed, so this process has none of it any more."""
    answered = threading.Event()

    def hold() -> None:
        answered.wait(DEADLINE_S)

    service.before["DropPool"] = hold
    with connect(service.target) as harbor:
        pool = harbor.open_pool("p", LAYOUT)
        with hurried(pool), pytest.raises(DeadlineExceeded):
            harbor.drop_pool("p")
        assert cuda_stub.live_count() == nothing_here
        answered.set()


def test_memory_is_let_go_before_the_session_is_closed(
    open_harbor: Connect, service: FakeService, nothing_here: int
) -> None:
    """C16: whoever drops the pool after CloseSession may free it."""
    harbor = open_harbor(service.target)
    harbor.open_pool("p", LAYOUT)
    closing = Watcher(service, "CloseSession", nothing_here)
    harbor.close()
    assert closing.counts == [0]


@pytest.mark.parametrize("arena", ["cuda_ipc"], indirect=True)
def test_a_close_under_arrays_leaves_the_session_without_the_assertion(
    open_harbor: Connect, service: FakeService
) -> None:
    """C16: the service waits for this process's end; the harbor is closed all the same [C6]."""
    harbor = open_harbor(service.target)
    pool = harbor.open_pool("p", LAYOUT)
    array = pool.views.page("k", 0, 0)
    with pytest.raises(StateRefused, match="still has live views") as error:
        harbor.close()
    assert (error.value.reason, service.calls["CloseSession"]) == ("MAPPING_IN_USE", [])
    assert service.accepted[0].recv(1) == b""
    with pytest.raises(HarborClosed):
        pool.stats()
    write(pool.memory.mapping, b"mine")
    del array
    pool.memory.close()


@pytest.mark.parametrize("arena", ["cuda_vmm"], indirect=True)
def test_arrays_over_chunks_outlive_the_session(open_harbor: Connect, service: FakeService) -> None:
    """C6: the memory behind them is theirs as long as they live, wherever the pool is."""
    harbor = open_harbor(service.target)
    pool = harbor.open_pool("p", LAYOUT)
    write(pool.memory.mapping, b"kept")
    array = pool.views.page("k", 0, 0)
    harbor.close()
    assert len(service.calls["CloseSession"]) == 1
    assert read(pool.memory.mapping, 4) == b"kept"
    del array
    pool.memory.close()
