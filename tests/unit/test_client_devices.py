"""A client of a pool in device memory: the driver is the stub, the service a fake. See tests/cuda_stub/README.md.

Never run on hardware: where a kernel would write, the tests write by the driver.
"""

import asyncio
import contextlib
import dataclasses
import os
import queue
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import cuda_stub
from fake_service import DEADLINE_S, FakeService, MakeArena
from integration.client_kinds import KINDS, connector
from integration.client_worker import LAYOUT
from ipc_owner import IpcOwner, OwnedArena
from kvharbor.client import (
    DeviceNotVisible,
    EpochEnded,
    MpsClientRefused,
    PoolDevicesMismatch,
    StateRefused,
    aio,
    connect,
)
from kvharbor.client.ordering import DeviceOrder
from kvharbor.gpumem import (
    Arena,
    ArenaClosed,
    ArenaKind,
    DeviceFailed,
    Export,
    GpumemError,
    VmmArena,
    attach,
    device_of,
    driver,
)
from kvharbor.gpumem.devices import current

Connect = Callable[..., Any]
pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Disguised:
    """An arena that is announced otherwise than it is."""

    arena: Arena
    changes: dict[str, Any]

    @property
    def kind(self) -> ArenaKind:
        return self.arena.kind

    @property
    def size_bytes(self) -> int:
        return self.arena.size_bytes

    def export(self) -> Export:
        return dataclasses.replace(self.arena.export(), **self.changes)

    def close(self) -> None:
        self.arena.close()


@pytest.fixture(autouse=True)
def _closed_in_the_end(stub_devices: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The driver is the stub, and what is made there by a test ends with it."""
    monkeypatch.setenv("KVHARBOR_CUDA_RUNTIME", "driver")
    before = cuda_stub.live_count()
    yield
    assert cuda_stub.live_count() == before


@pytest.fixture(scope="module")
def owner(stub_devices: tuple[str, str]) -> Iterator[IpcOwner]:
    """A process that owns cuda_ipc arenas."""
    with IpcOwner({**cuda_stub.environment(stub_devices), "KVHARBOR_CUDA_RUNTIME": "driver"}) as started:
        yield started


@pytest.fixture
def make_ipc(owner: IpcOwner, stub_devices: tuple[str, str]) -> MakeArena:
    """Makes cuda_ipc arenas on the second device."""
    return lambda size_bytes, _: OwnedArena(owner, owner.create(size_bytes, stub_devices[1]))


@pytest.fixture
def make_vmm(stub_devices: tuple[str, str]) -> MakeArena:
    """Makes cuda_vmm arenas on the second device."""
    return lambda size_bytes, _: VmmArena.create(size_bytes, device_of(stub_devices[1]))


Start = Callable[[MakeArena], FakeService]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts fakes with arenas of a kind."""
    with contextlib.ExitStack() as ending:

        def started(make_arena: MakeArena) -> FakeService:
            service = FakeService(tmp_path, LAYOUT, 8, make_arena)
            ending.callback(service.close)
            return service

        yield started


@pytest.fixture(params=["cuda_ipc", "cuda_vmm"])
def service(request: pytest.FixtureRequest, start: Start) -> FakeService:
    """A fake whose pool lies on the second device."""
    make: MakeArena = request.getfixturevalue("make_ipc" if request.param == "cuda_ipc" else "make_vmm")
    return start(make)


@pytest.fixture(params=KINDS)
def open_harbor(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Connects with the client under test."""
    with connector(request.param) as connected:
        yield connected


def write(mapping: Any, content: bytes) -> None:
    with current(mapping.device):
        driver.write_bytes(mapping.address, content)


def read(mapping: Any, size_bytes: int) -> bytes:
    with current(mapping.device):
        return driver.read_bytes(mapping.address, size_bytes)


def seen_by_the_service(service: FakeService, size_bytes: int) -> bytes:
    """The first bytes of the pool, in another mapping of the arena or in the process that has it."""
    (arena,) = service.arenas
    if isinstance(arena, OwnedArena):
        return arena.owner.read(arena.exported, 0, size_bytes)
    mapping = attach(arena.export())
    try:
        return read(mapping, size_bytes)
    finally:
        mapping.close()


def until_the_next_epoch(call: Callable[[], Any]) -> Any:
    while True:
        with contextlib.suppress(EpochEnded):
            return call()


def test_a_pool_is_mapped_where_its_uuid_says(
    open_harbor: Connect, service: FakeService, stub_devices: tuple[str, str]
) -> None:
    """F5: the service hears which devices are seen here, and what is written here is there."""
    pool = open_harbor(service.target).open_pool("p", LAYOUT)
    mapping = pool.memory.mapping
    assert (mapping.device.uuid, mapping.device.ordinal) == (stub_devices[1], 1)
    assert pool.memory.devices == (stub_devices[1],)
    write(mapping, b"written here")
    assert seen_by_the_service(service, 12) == b"written here"
    first, second = service.attaches
    assert not first.HasField("device_view")
    assert (list(second.device_view.visible_devices), second.device_view.mps_client) == ([*stub_devices], False)


def test_a_member_reads_what_the_leader_has_written(open_harbor: Connect, start: Start, make_vmm: MakeArena) -> None:
    """C13: vmm memory can be mapped for reading only."""
    leader = open_harbor(start(make_vmm).target)
    pool = leader.open_pool("p", LAYOUT)
    member = open_harbor(leader._link.address.target, join=leader.join_token, rank=1, read_only=True)
    memory = member.attach_pool(pool.id)
    write(pool.memory.mapping, b"for all")
    assert read(memory.mapping, 7) == b"for all"
    assert not memory.mapping.writable


def test_ipc_memory_cannot_be_mapped_for_reading_only(open_harbor: Connect, start: Start, make_ipc: MakeArena) -> None:
    """C13: the guard does not exist there, and a member that asks for it is told so."""
    leader = open_harbor(start(make_ipc).target)
    pool = leader.open_pool("p", LAYOUT)
    member = open_harbor(leader._link.address.target, join=leader.join_token, rank=1, read_only=True)
    with pytest.raises(StateRefused, match="cannot map read-only") as error:
        member.attach_pool(pool.id)
    assert error.value.reason == "ARENA_UNFIT"


def test_a_device_that_is_not_seen_here_is_refused(open_harbor: Connect, start: Start, make_vmm: Any) -> None:
    """F5: by the service, which is told what this process sees; it is asked once more, not for ever."""
    service = start(lambda size_bytes, name: Disguised(make_vmm(size_bytes, name), {"device": "GPU-elsewhere"}))
    with pytest.raises(DeviceNotVisible):
        open_harbor(service.target).open_pool("p", LAYOUT)
    assert [attach.HasField("device_view") for attach in service.attaches] == [False, True]


def test_a_client_of_mps_says_so(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its death would not prove that its kernels have stopped; the service decides."""
    monkeypatch.setenv("KVSTUB_MPS", "1")
    with connect(service.target) as harbor, pytest.raises(MpsClientRefused):
        harbor.open_pool("p", LAYOUT)


@pytest.mark.parametrize("changes", [{"chunk_bytes": (4096,)}, {"fds": ()}], ids=["odd chunk", "no descriptor"])
def test_memory_that_cannot_be_mapped_has_the_reason(
    open_harbor: Connect, start: Start, make_vmm: Any, changes: dict[str, Any]
) -> None:
    """The GpumemError is the cause; no descriptor and no range stays."""
    service = start(lambda size_bytes, name: Disguised(make_vmm(size_bytes, name), changes))
    with pytest.raises(StateRefused) as error:
        open_harbor(service.target).open_pool("p", LAYOUT)
    assert error.value.reason == "ARENA_UNFIT"
    assert isinstance(error.value.__cause__, GpumemError)


def test_a_pid_that_is_the_exporters_is_refused_with_the_remedy(
    open_harbor: Connect, start: Start, make_ipc: MakeArena
) -> None:
    """Two containers whose first process has pid 1: the driver would take them for one."""
    service = start(lambda size_bytes, name: Disguised(make_ipc(size_bytes, name), {"exporter_pid": os.getpid()}))
    with pytest.raises(StateRefused, match="shareProcessNamespace") as error:
        open_harbor(service.target).open_pool("p", LAYOUT)
    assert (error.value.reason, error.value.metadata["ownPid"]) == ("IPC_REFUSED", str(os.getpid()))


def test_a_device_that_fails_is_told_with_the_call_that_failed(
    open_harbor: Connect, start: Start, make_vmm: MakeArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code and call of the driver are metadata."""
    service = start(make_vmm)
    monkeypatch.setenv("KVSTUB_FAIL", "cuMemSetAccess:1:700")
    with pytest.raises(StateRefused) as error:
        open_harbor(service.target).open_pool("p", LAYOUT)
    assert (error.value.reason, error.value.metadata["call"]) == ("DEVICE_FAILED", "cuMemSetAccess")
    assert error.value.metadata["code"] == "CUDA_ERROR_ILLEGAL_ADDRESS"


WITHOUT_CUDA = """
import sys
from kvharbor.client import StateRefused, connect
from integration.client_worker import LAYOUT

with connect(sys.argv[1]) as harbor:
    try:
        harbor.open_pool("p", LAYOUT)
    except StateRefused as refused:
        print(refused.reason, "remedy" in refused.metadata)
"""


def test_a_process_without_cuda_is_told_what_it_lacks(start: Start, make_vmm: MakeArena) -> None:
    """The pool is there, the driver is not."""
    script = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{WITHOUT_CUDA}"]
    done = subprocess.run(
        [*script, start(make_vmm).target], capture_output=True, text=True, timeout=60, check=False, env={}
    )
    assert (done.stdout, done.stderr) == ("CUDA_UNAVAILABLE True\n", "")


def test_a_commit_waits_for_the_device(
    open_harbor: Connect, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C14: without torch for the whole context; when that has failed, nothing is published."""
    pool = open_harbor(service.target).open_pool("p", LAYOUT)
    assert isinstance(pool.order, DeviceOrder)
    held = pool.allocate(range(16))
    monkeypatch.setenv("KVSTUB_FAIL", "cuCtxSynchronize:1:700")
    for call in (lambda: held.commit(16), held.release):
        with pytest.raises(DeviceFailed, match="cuCtxSynchronize failed with CUDA_ERROR_ILLEGAL_ADDRESS"):
            call()
    assert (service.calls["Commit"], service.calls["Release"]) == ([], [])
    monkeypatch.delenv("KVSTUB_FAIL")
    held.commit(16)
    held.release()


def test_vmm_memory_is_replaced_in_its_place(open_harbor: Connect, start: Start, make_vmm: MakeArena) -> None:
    """C12: the same addresses and views show the new pool's memory; nothing has moved."""
    service, moved = start(make_vmm), list[Any]()
    harbor = open_harbor(service.target, on_epoch=lambda *_: None, on_moved=moved.append)
    pool = harbor.open_pool("p", LAYOUT)
    address, views = pool.memory.mapping.address, pool.views
    write(pool.memory.mapping, b"old")
    service.new_epoch()
    assert until_the_next_epoch(pool.stats).pool_id == "e2.1"
    assert (pool.memory.mapping.address, pool.views) == (address, views)
    assert read(pool.memory.mapping, 3) == b"\0\0\0"
    write(pool.memory.mapping, b"new")
    assert seen_by_the_service(service, 3) == b"new"
    assert moved == []
    assert list(service.calls["OpenPool"][-1].devices) == list(pool.memory.devices)


def test_ipc_memory_moves_and_the_engine_takes_new_views(
    open_harbor: Connect, start: Start, make_ipc: MakeArena
) -> None:
    """C15: before any call on the pool is made; the old views raise, as what they showed is gone."""
    service, moved = start(make_ipc), queue.Queue[Any]()
    harbor = open_harbor(
        service.target, on_epoch=lambda *_: None, on_moved=lambda pool: moved.put((pool.id, pool.views))
    )
    pool = harbor.open_pool("p", LAYOUT)
    old_views = pool.views
    write(pool.memory.mapping, b"old")
    service.new_epoch()
    assert until_the_next_epoch(pool.stats).pool_id == "e2.1"
    assert moved.get(timeout=DEADLINE_S) == ("e1.1", pool.views)
    assert moved.empty()
    assert pool.views is not old_views
    with pytest.raises(ArenaClosed):
        old_views.page("k", 0, 0)
    assert read(pool.memory.mapping, 3) == b"\0\0\0"
    write(pool.memory.mapping, b"new")
    assert seen_by_the_service(service, 3) == b"new"


def test_ipc_memory_that_is_still_in_use_ends_the_harbor(
    open_harbor: Connect, start: Start, make_ipc: MakeArena
) -> None:
    """C15: an array over memory that goes away would break the whole process's context."""
    service = start(make_ipc)
    harbor = open_harbor(service.target, on_epoch=lambda *_: None)
    pool = harbor.open_pool("p", LAYOUT)
    array = pool.memory.mapping.borrow()
    service.new_epoch()
    with pytest.raises(StateRefused) as error:
        until_the_next_epoch(pool.stats)
    assert error.value.reason == "MAPPING_IN_USE"
    assert pool.memory.mapping.address
    del array


def test_asyncio_awaits_on_moved_on_its_loop(start: Start, make_ipc: MakeArena) -> None:
    """As on_epoch: a coroutine may rebuild the engine's tensors."""
    service = start(make_ipc)

    async def body() -> None:
        told: list[str] = []

        async def on_moved(pool: aio.Pool) -> None:
            await asyncio.sleep(0)
            told.append(pool.name)

        async with aio.connect(service.target, on_epoch=lambda *_: None, on_moved=on_moved) as harbor:
            pool = await harbor.open_pool("p", LAYOUT)
            await asyncio.to_thread(service.new_epoch)
            with contextlib.suppress(EpochEnded):
                await pool.stats()
            await pool.stats()
            assert told == ["p"]

    asyncio.run(body())


def test_a_pool_that_lies_elsewhere_in_the_new_epoch_ends_the_harbor(
    start: Start, stub_devices: tuple[str, str]
) -> None:
    """Tensors belong to a device, and so does the engine's part."""
    places = iter([stub_devices[1], stub_devices[0]])
    service = start(lambda size_bytes, _: VmmArena.create(size_bytes, device_of(next(places))))
    with connect(service.target, on_epoch=lambda *_: None) as harbor:
        pool = harbor.open_pool("p", LAYOUT)
        service.new_epoch()
        with pytest.raises(PoolDevicesMismatch, match=f"{stub_devices[0]} in the new epoch"):
            until_the_next_epoch(pool.stats)
