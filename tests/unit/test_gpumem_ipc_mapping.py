"""Mappings of a cuda_ipc arena that another process owns, on the stub of the driver.

The stub refuses to open in one process what is open there, so a second opening cannot go unseen, and counts all that
lives in this process, so neither can a missing close.
"""

import dataclasses
import os
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import cuda_stub
from ipc_owner import IpcOwner, OwnerRefused
from kvharbor.gpumem import (
    ArenaClosed,
    ArenaKind,
    ArenaUnfit,
    BlockViews,
    DataType,
    Device,
    DeviceFailed,
    DeviceNotVisible,
    Export,
    IpcMapping,
    IpcRefused,
    Layout,
    Mapped,
    MappingInUse,
    attach,
    device_of,
    driver,
    visible_devices,
)
from kvharbor.gpumem.devices import current
from kvharbor.gpumem.driver_runtime import DriverRuntime
from on_stub import owner_environment

DESCRIPTOR = Layout.attention("m", 2, 2, 8, DataType.FLOAT16, 16).descriptor(8)
SIZE_BYTES = DESCRIPTOR.size_bytes
MIB = 2**20
pytestmark = pytest.mark.usefixtures("no_leaks", "nothing_here")


@pytest.fixture
def device(stub_devices: tuple[str, str]) -> Device:
    return device_of(stub_devices[1])


@pytest.fixture
def owner(ipc_owner: IpcOwner) -> Iterator[IpcOwner]:
    yield ipc_owner
    ipc_owner.free_all()


@pytest.fixture
def export(owner: IpcOwner, device: Device) -> Export:
    return owner.create(SIZE_BYTES, device.uuid)


def read(mapping: IpcMapping, first: int, count: int) -> bytes:
    with current(mapping.device):
        return driver.read_bytes(mapping.address + first, count)


def write(mapping: IpcMapping, first: int, content: bytes) -> None:
    with current(mapping.device):
        driver.write_bytes(mapping.address + first, content)


def test_two_processes_have_one_memory(owner: IpcOwner, export: Export, device: Device) -> None:
    """It begins zeroed [P6], and what either writes the other reads."""
    assert export == Export(
        ArenaKind.CUDA_IPC,
        SIZE_BYTES,
        device=device.uuid,
        ipc_handle=export.ipc_handle,
        exporter_pid=owner.process.pid,
    )
    with IpcMapping.attach(export) as mapping:
        assert read(mapping, 0, SIZE_BYTES) == bytes(SIZE_BYTES)
        write(mapping, SIZE_BYTES - 4, b"here")
        owner.write(export, 0, b"there")
        assert owner.read(export, SIZE_BYTES - 4, 4) == b"here"
        assert read(mapping, 0, 5) == b"there"


def test_a_handle_is_opened_once_a_process_and_closed_by_its_last_user(owner: IpcOwner, export: Export) -> None:
    """M13: users share one address, whoever comes and goes in between."""
    before = cuda_stub.live_count()
    first, second = IpcMapping.attach(export), IpcMapping.attach(export)
    assert (first.address, cuda_stub.live_count()) == (second.address, before + 1)
    first.close()
    with IpcMapping.attach(export) as third:
        assert third.address == second.address
    del first, third  # what is closed must not be given back again by its finalizer
    owner.write(export, 7, b"still")
    assert read(second, 7, 5) == b"still"
    second.close()
    assert cuda_stub.live_count() == before


def test_an_offset_is_added_to_the_shared_address(owner: IpcOwner, export: Export) -> None:
    """M13: the handle names the whole allocation; the offset is the mapping's own."""
    owner.write(export, 4096, b"part")
    part = dataclasses.replace(export, offset_bytes=4096, size_bytes=SIZE_BYTES - 4096)
    with IpcMapping.attach(export) as whole, IpcMapping.attach(part) as mapping:
        assert mapping.address == whole.address + 4096
        assert read(mapping, 0, 4) == b"part"


def test_threads_that_come_together_share_one_opening(export: Export) -> None:
    """M13: between looking and opening no other thread may do the same."""
    before = cuda_stub.live_count()
    line = threading.Barrier(8)
    failures: list[BaseException] = []

    def come_and_go() -> None:
        try:
            for _ in range(20):
                line.wait(30)
                IpcMapping.attach(export).close()
        except BaseException as failure:
            failures.append(failure)
            line.abort()

    threads = [threading.Thread(target=come_and_go) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert cuda_stub.live_count() == before


def test_a_mapping_cannot_be_closed_or_vacated_under_a_living_view(owner: IpcOwner, export: Export) -> None:
    """M8: the address goes with the mapping, and a kernel on it would break the process's context."""
    other = owner.create(SIZE_BYTES, export.device)
    mapping = IpcMapping.attach(export)
    views = BlockViews(mapping, DESCRIPTOR)
    part = views.cupy("k", 1)[3]
    views.close()
    for end in (mapping.close, mapping.vacate, lambda: mapping.replace(other)):
        with pytest.raises(MappingInUse, match="live views"):
            end()
    assert part.data.ptr == mapping.address + DESCRIPTOR.page_offset_bytes("k", 1, 3)
    del part
    mapping.close()


def test_a_view_is_the_memory_itself(owner: IpcOwner, export: Export) -> None:
    """Where CuPy says that an element lies, there the other process has it."""
    page_bytes = np.random.default_rng(1).bytes(DESCRIPTOR.spans[1].plane.page_bytes)
    owner.write(export, DESCRIPTOR.page_offset_bytes("v", 1, 5), page_bytes)
    with IpcMapping.attach(export) as mapping:
        views = BlockViews(mapping, DESCRIPTOR)
        address = views.page("v", 1, 5).data.ptr
        with current(mapping.device):
            assert driver.read_bytes(address, len(page_bytes)) == page_bytes
        views.close()


def test_a_mapping_that_is_dropped_is_closed_with_its_last_view(export: Export) -> None:
    """A client that ends under living tensors lets go of them by and by; the memory must not stay till its exit."""
    before = cuda_stub.live_count()
    views = BlockViews(IpcMapping.attach(export), DESCRIPTOR)
    view = views.cupy("k", 0)
    views.close()
    assert cuda_stub.live_count() == before + 1
    del view
    assert cuda_stub.live_count() == before


def test_a_mapping_may_be_dropped_in_the_midst_of_an_opening(owner: IpcOwner, export: Export) -> None:
    """A garbage collection can run anywhere: its close waits for the opening, and neither waits for ever."""
    other = owner.create(SIZE_BYTES, export.device)
    dropped = [IpcMapping.attach(other)]
    before = cuda_stub.live_count()

    class Collecting(DriverRuntime):
        def open(self, device: Device, handle: bytes) -> int:
            dropped.clear()
            assert cuda_stub.live_count() == before
            return super().open(device, handle)

    with IpcMapping.attach(export, runtime=Collecting()):
        assert cuda_stub.live_count() == before


def test_a_vacated_mapping_has_no_memory_and_no_address_until_another_arena_comes(
    owner: IpcOwner, export: Export
) -> None:
    """M11, as far as CUDA IPC can: the old memory goes from this process, and the new one's views are new."""
    other = owner.create(SIZE_BYTES, export.device)
    owner.write(other, 0, b"new")
    before = cuda_stub.live_count()
    with IpcMapping.attach(export) as mapping:
        for _ in range(2):
            mapping.vacate()
            assert cuda_stub.live_count() == before
        without_memory: list[Callable[[], object]] = [lambda: mapping.address, lambda: BlockViews(mapping, DESCRIPTOR)]
        for use in (*without_memory, mapping.borrow):
            with pytest.raises(ArenaClosed, match="vacated"):
                use()
        owner.free(export)
        mapping.replace(other)
        assert read(mapping, 0, 3) == b"new"
    for use in (*without_memory, mapping.borrow, mapping.vacate, lambda: mapping.replace(other)):
        with pytest.raises(ArenaClosed, match="this mapping is closed"):
            use()
    mapping.close()


def test_another_arena_takes_the_place_of_one_that_is_mapped(
    owner: IpcOwner, export: Export, stub_devices: tuple[str, str]
) -> None:
    """Also on another device; the first is let go."""
    other = owner.create(SIZE_BYTES, stub_devices[0])
    owner.write(other, 0, b"new")
    before = cuda_stub.live_count()
    with IpcMapping.attach(export) as mapping:
        mapping.replace(other)
        assert (read(mapping, 0, 3), mapping.device.uuid) == (b"new", stub_devices[0])
        assert cuda_stub.live_count() == before + 1


def test_an_unfit_arena_takes_nobodys_place(owner: IpcOwner, export: Export) -> None:
    """M6: what is mapped stays mapped."""
    unfit = [
        owner.create(SIZE_BYTES + 1, export.device),
        dataclasses.replace(export, ipc_handle=bytes(63)),
        dataclasses.replace(export, ipc_handle=bytes(64)),
        dataclasses.replace(export, device=cuda_stub.new_uuid()),
    ]
    owner.write(export, 0, b"old")
    with IpcMapping.attach(export) as mapping:
        for other in unfit:
            with pytest.raises((ArenaUnfit, DeviceFailed, DeviceNotVisible)):
                mapping.replace(other)
            assert read(mapping, 0, 3) == b"old"


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({"ipc_handle": b""}, "its handle has 0 bytes, not 64"),
        ({"ipc_handle": bytes(65)}, "its handle has 65 bytes, not 64"),
        ({"kind": ArenaKind.CUDA_VMM}, "it is of the kind 'cuda_vmm'"),
        ({"offset_bytes": -1}, "begins at -1"),
        ({"size_bytes": 0}, "at least one byte"),
    ],
)
def test_an_export_that_cannot_be_right_is_refused(export: Export, changed: dict[str, object], cause: str) -> None:
    """M6: its numbers come from the wire; CuPy would answer with an IndexError, or the driver with a bare code."""
    with pytest.raises(ArenaUnfit, match=cause):
        IpcMapping.attach(dataclasses.replace(export, **changed))  # type: ignore[arg-type]


def test_a_read_only_mapping_is_refused(export: Export) -> None:
    """CUDA IPC has none: whoever asked for one must not be able to write after all."""
    with pytest.raises(ArenaUnfit, match=r"cannot map read-only; .* use the arena 'cuda_vmm'"):
        attach(export, writable=False)


def test_any_arena_is_attached_by_its_export(owner: IpcOwner, export: Export) -> None:
    """The caller need not know the kinds."""
    mapping: Mapped = attach(export)
    assert (type(mapping), mapping.kind, mapping.writable) == (IpcMapping, ArenaKind.CUDA_IPC, True)
    mapping.close()


def test_a_process_that_has_the_exporters_pid_is_told_of_namespaces(export: Export) -> None:
    """Two containers can both have pid 1, and the driver takes them for one process: both sides and a way out."""
    twin = dataclasses.replace(export, exporter_pid=os.getpid())
    with pytest.raises(IpcRefused, match="shareProcessNamespace") as refused:
        IpcMapping.attach(twin)
    assert refused.value.metadata() | {"cause": "", "remedy": ""} == {
        "cause": "",
        "device": export.device,
        "exporterPid": str(os.getpid()),
        "ownPid": str(os.getpid()),
        "remedy": "",
    }


def test_memory_on_a_device_that_is_not_visible_is_refused_with_both_sides(export: Export) -> None:
    """F5: by UUID; no number of the exporter's is used."""
    elsewhere = cuda_stub.new_uuid()
    with pytest.raises(DeviceNotVisible) as refused:
        IpcMapping.attach(dataclasses.replace(export, device=elsewhere))
    assert refused.value.device == elsewhere
    assert refused.value.visible_devices == ", ".join(device.uuid for device in visible_devices())


def test_an_opening_that_fails_leaves_nothing_behind(export: Export, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one is the first again."""
    with monkeypatch.context() as failing:
        failing.setenv("KVSTUB_FAIL", "cuIpcOpenMemHandle:1")
        with pytest.raises(DeviceFailed, match="cuIpcOpenMemHandle failed with CUDA_ERROR"):
            IpcMapping.attach(export)
    IpcMapping.attach(export).close()


def test_a_forked_child_has_nothing_open_and_closes_nothing(export: Export) -> None:
    """M7: CUDA does not survive a fork; what the child does with its copy of the mapping reaches no driver."""
    with IpcMapping.attach(export) as mapping:
        child = os.fork()
        if child == 0:
            open_here = cuda_stub.live_count()
            mapping.close()
            os._exit(0 if cuda_stub.live_count() == open_here else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert read(mapping, 0, 1) == b"\0"


@pytest.mark.slow
def test_memory_outlives_its_owner_where_it_is_open(stub_devices: tuple[str, str]) -> None:
    """What is mapped stays mapped after a SIGKILL; nobody else can come to it any more."""
    with IpcOwner(owner_environment(stub_devices)) as owner:
        export = owner.create(SIZE_BYTES, stub_devices[0])
        owner.write(export, 0, b"last words")
        mapping = IpcMapping.attach(export)
        owner.kill()
    assert read(mapping, 0, 10) == b"last words"
    mapping.close()
    with pytest.raises(DeviceFailed):
        IpcMapping.attach(export)


def test_the_owner_in_another_process_is_told_too(owner: IpcOwner, export: Export) -> None:
    """It is the handle that decides, whatever pid the export names."""
    with pytest.raises(OwnerRefused, match="it is its own") as refused:
        owner.map_own(dataclasses.replace(export, exporter_pid=1))
    assert refused.value.reason == "IPC_REFUSED"
