"""What only the cuda_vmm arena promises: chunks, growing and shrinking, and that nothing is left when a call fails.

On the stub of the driver, whose devices count what any process holds of them.
"""

import dataclasses
import gc
import os
from collections.abc import Iterator

import pytest

import cuda_stub
from contract.arena_kinds import VmmKind
from contract.peer import Peer
from kvharbor.gpumem import (
    ArenaClosed,
    ArenaUnfit,
    Device,
    DeviceFailed,
    DeviceNotVisible,
    Export,
    InsufficientMemory,
    LayoutInvalid,
    VmmArena,
    VmmMapping,
    device_of,
)
from kvharbor.gpumem.cuda_vmm import MAX_CHUNKS
from kvharbor.gpumem.devices import memory_of

UNIT = cuda_stub.GRANULARITY_BYTES
VMM = VmmKind()


@pytest.fixture
def device(stub_devices: tuple[str, str]) -> Device:
    return device_of(stub_devices[0])


@pytest.fixture(autouse=True)
def _nothing_is_left_on_the_device(stub_devices: tuple[str, str], _leave_nothing_behind: None) -> Iterator[None]:
    """No handle, range or mapping, and no memory of either device."""
    devices = [device_of(uuid) for uuid in stub_devices]
    before = cuda_stub.live_count(), [memory_of(device).free_bytes for device in devices]
    yield
    gc.collect()
    assert (cuda_stub.live_count(), [memory_of(device).free_bytes for device in devices]) == before


@pytest.fixture
def arena(device: Device) -> Iterator[VmmArena]:
    """Three chunks, of the last of which one byte is used."""
    with VmmArena.create(2 * UNIT + 1, device) as made:
        yield made


@pytest.mark.parametrize(
    ("size_bytes", "expected"),
    [
        (1, [UNIT]),
        (3 * UNIT, [UNIT] * 3),
        (16 * UNIT, [UNIT] * 16),
        (16 * UNIT + 1, [2 * UNIT] * 8 + [UNIT]),
        (100 * UNIT, [7 * UNIT] * 14 + [2 * UNIT]),
    ],
)
def test_an_arena_has_few_chunks_of_whole_units(size_bytes: int, expected: list[int], device: Device) -> None:
    """Each chunk is a descriptor, and half of what there may be stays free for growing."""
    with VmmArena.create(size_bytes, device) as arena:
        assert list(arena.export().chunk_bytes) == expected
        assert len(arena.export().fds) == len(expected) <= MAX_CHUNKS // 2


@pytest.mark.parametrize("size_bytes", [0, -1, 2**63])
def test_a_size_that_no_arena_has_is_refused(size_bytes: int, device: Device) -> None:
    """[M3]: before the driver sees it."""
    with pytest.raises(LayoutInvalid, match="size_bytes"):
        VmmArena.create(size_bytes, device)


def test_the_memory_is_the_descriptors_and_goes_with_the_last_holder(arena: VmmArena, device: Device) -> None:
    """No handle is kept; a mapping keeps the memory when the descriptors are closed, and vacating lets it go."""
    free_bytes = memory_of(device).free_bytes
    with arena.map() as mapping:
        arena.close()
        assert memory_of(device).free_bytes == free_bytes
        mapping.vacate()
        assert memory_of(device).free_bytes == free_bytes + 3 * UNIT


def test_another_process_takes_over_the_descriptors(arena: VmmArena, device: Device) -> None:
    """A successor holds the same memory, with what is in it."""
    export = arena.export()
    with arena.map() as mapping:
        VMM.write(mapping, 5, b"kept")
    fds = [os.dup(fd) for fd in export.fds]
    arena.close()
    with (
        VmmArena.opened(fds, export.chunk_bytes, device=device, size_bytes=export.size_bytes) as successor,
        successor.map() as mapping,
    ):
        assert VMM.read(mapping, 5, 4) == b"kept"


def test_descriptors_that_are_not_one_a_chunk_are_not_taken_over(arena: VmmArena, device: Device) -> None:
    """They stay the caller's."""
    export = arena.export()
    for fds, size_bytes in ((export.fds[:2], export.size_bytes), (export.fds, 3 * UNIT + 1), (export.fds, 0)):
        with pytest.raises(ArenaUnfit):
            VmmArena.opened(fds, export.chunk_bytes, device=device, size_bytes=size_bytes)
    assert all(os.fstat(fd).st_size == UNIT for fd in export.fds)


def test_a_device_without_room_says_so_and_keeps_nothing(device: Device, peer: Peer) -> None:
    """What another process holds counts; the error names the device and what is free on it."""
    held = peer.create("cuda_vmm", 200 * 2**20)
    with pytest.raises(InsufficientMemory, match=f"device {device.uuid} leaves") as refusal:
        VmmArena.create(100 * 2**20, device)
    assert refusal.value.needed_bytes == 100 * 2**20
    assert refusal.value.available_bytes < 56 * 2**20
    for fd in held.fds:
        os.close(fd)


def test_an_arena_grows_and_shrinks_under_a_mapping(arena: VmmArena) -> None:
    """The chunks that stay are not remapped: their bytes and addresses are the same throughout."""
    with VmmMapping.attach(arena.export(), reserved_bytes=9 * UNIT) as mapping:
        address = mapping.address
        VMM.write(mapping, UNIT - 2, b"over")
        arena.grow(5 * UNIT + 7)
        mapping.resize(arena.export())
        assert (mapping.size_bytes, list(arena.export().chunk_bytes)) == (5 * UNIT + 7, [UNIT, UNIT, UNIT, 3 * UNIT])
        assert VMM.read(mapping, 3 * UNIT, 2 * UNIT + 7) == bytes(2 * UNIT + 7)
        VMM.write(mapping, 5 * UNIT, b"end")
        arena.shrink(UNIT + 1)
        mapping.resize(arena.export())
        assert (mapping.size_bytes, list(arena.export().chunk_bytes)) == (UNIT + 1, [UNIT, UNIT])
        assert (VMM.read(mapping, UNIT - 2, 4), mapping.address) == (b"over", address)
        with pytest.raises(DeviceFailed):
            VMM.read(mapping, 2 * UNIT, 1)


def test_an_arena_that_still_has_room_grows_without_a_chunk(arena: VmmArena) -> None:
    """Chunks are whole units, and the last one may be used in part."""
    fds = arena.export().fds
    arena.grow(3 * UNIT)
    assert (arena.size_bytes, arena.export().fds) == (3 * UNIT, fds)


def test_an_arena_grows_to_so_many_chunks_and_no_further(device: Device) -> None:
    """Nothing has changed where it is refused."""
    with VmmArena.create(UNIT, device) as arena:
        for count in range(2, MAX_CHUNKS + 1):
            arena.grow(count * UNIT)
        with pytest.raises(LayoutInvalid, match=f"in the {MAX_CHUNKS} chunks"):
            arena.grow((MAX_CHUNKS + 1) * UNIT)
        assert (arena.size_bytes, len(arena.export().fds)) == (MAX_CHUNKS * UNIT, MAX_CHUNKS)


def test_growing_is_not_shrinking(arena: VmmArena) -> None:
    """Each refuses the other's sizes."""
    with pytest.raises(LayoutInvalid):
        arena.grow(UNIT)
    for size_bytes in (0, 3 * UNIT):
        with pytest.raises(LayoutInvalid):
            arena.shrink(size_bytes)


def test_a_mapping_follows_only_its_own_arena_and_within_its_addresses(arena: VmmArena, device: Device) -> None:
    """Refused with nothing changed: no room in the range, and chunks that are not those that are mapped."""
    with arena.map() as mapping, VmmArena.create(40 * UNIT, device) as other:
        VMM.write(mapping, 3, b"mine")
        arena.grow(4 * UNIT)
        with pytest.raises(ArenaUnfit, match=f"{3 * UNIT} bytes of addresses are reserved"):
            mapping.resize(arena.export())
        with pytest.raises(ArenaUnfit, match="chunks are not those"):
            mapping.resize(other.export())
        assert (VMM.read(mapping, 3, 4), mapping.size_bytes) == (b"mine", 2 * UNIT + 1)


def changed(export: Export, **changes: object) -> Export:
    return dataclasses.replace(export, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "chunk_bytes", [(UNIT, UNIT), (UNIT, UNIT, UNIT + 1), (UNIT, UNIT, 0), (UNIT, 2 * UNIT, -UNIT), (UNIT,) * 4]
)
def test_chunks_of_odd_sizes_are_refused(chunk_bytes: tuple[int, ...], arena: VmmArena) -> None:
    """[M3]: sizes come from the wire."""
    with pytest.raises(ArenaUnfit):
        VmmMapping.attach(changed(arena.export(), chunk_bytes=chunk_bytes))


def test_an_arena_on_another_device_takes_nobodys_place(arena: VmmArena, stub_devices: tuple[str, str]) -> None:
    """Views know their device."""
    with arena.map() as mapping, VmmArena.create(arena.size_bytes, device_of(stub_devices[1])) as other:
        VMM.write(mapping, 3, b"mine")
        with pytest.raises(ArenaUnfit, match=f"lies on device {stub_devices[1]}, the mapping on {stub_devices[0]}"):
            mapping.replace(other.export())
        assert VMM.read(mapping, 3, 4) == b"mine"


def test_a_device_that_this_process_does_not_see_is_named(arena: VmmArena, stub_devices: tuple[str, str]) -> None:
    """F5: with all that it does see."""
    stranger = cuda_stub.new_uuid()
    with pytest.raises(DeviceNotVisible, match=f"{stranger} is not visible here, visible: {', '.join(stub_devices)}"):
        VmmMapping.attach(changed(arena.export(), device=stranger))


def test_a_mapping_that_is_dropped_goes_with_its_last_borrow(arena: VmmArena) -> None:
    """Views may outlive whoever made them; [M8] holds without a close."""
    live = cuda_stub.live_count()
    borrow: object = arena.map().borrow()
    gc.collect()
    assert cuda_stub.live_count() == live + 4  # the range, and a mapping a chunk
    del borrow
    gc.collect()
    assert cuda_stub.live_count() == live


def test_a_closed_arena_and_a_closed_mapping_say_so(arena: VmmArena) -> None:
    """Closing twice is nothing; using what is closed is a typed error."""
    mapping, export = arena.map(), arena.export()
    for _ in range(2):
        mapping.close()
        arena.close()
    with pytest.raises(ArenaClosed, match="arena is closed"):
        arena.export()
    for use in (mapping.borrow, mapping.vacate, lambda: mapping.replace(export), lambda: mapping.resize(export)):
        with pytest.raises(ArenaClosed, match="mapping is closed"):
            use()
    with pytest.raises(ArenaClosed, match="mapping is closed"):
        _ = mapping.address


# The third call of those that are made once a chunk: the first two have to be undone.
MAKING = ["cuMemCreate:3", "cuMemExportToShareableHandle:3"]
MAPPING = ["cuMemAddressReserve:1", "cuMemImportFromShareableHandle:3", "cuMemMap:3", "cuMemSetAccess:1"]


@pytest.mark.parametrize("fault", [*MAKING, *MAPPING, "cuMemsetD8Async:1", "cuStreamSynchronize:1"])
def test_making_an_arena_is_undone_whatever_call_fails(
    fault: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it or nothing: what is left is looked at by the fixture."""
    monkeypatch.setenv("KVSTUB_FAIL", fault)
    with pytest.raises(DeviceFailed, match=f"{fault.split(':')[0]} failed with CUDA_ERROR_UNKNOWN \\(unknown error\\)"):
        VmmArena.create(2 * UNIT + 1, device)


@pytest.mark.parametrize("fault", MAPPING)
def test_attaching_is_undone_whatever_call_fails(fault: str, arena: VmmArena, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next attach, with a driver that is well again, works."""
    monkeypatch.setenv("KVSTUB_FAIL", fault)
    with pytest.raises(DeviceFailed):
        arena.map()
    monkeypatch.delenv("KVSTUB_FAIL")
    with arena.map() as mapping:
        assert VMM.read(mapping, 0, 1) == b"\0"


@pytest.mark.parametrize("fault", ["cuMemImportFromShareableHandle:3", "cuMemMap:3", "cuMemSetAccess:1"])
def test_replacing_leaves_the_first_arena_or_a_vacant_range(
    fault: str, arena: VmmArena, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never half of each; and a later replace works."""
    with arena.map() as mapping, VmmArena.create(arena.size_bytes, device) as other:
        VMM.write(mapping, 3, b"mine")
        monkeypatch.setenv("KVSTUB_FAIL", fault)
        with pytest.raises(DeviceFailed):
            mapping.replace(other.export())
        monkeypatch.delenv("KVSTUB_FAIL")
        if "Import" in fault:
            assert VMM.read(mapping, 3, 4) == b"mine"
        else:
            for offset_bytes in (0, UNIT, 2 * UNIT):
                with pytest.raises(DeviceFailed, match="ILLEGAL_ADDRESS"):
                    VMM.read(mapping, offset_bytes, 1)
        mapping.replace(other.export())
        assert VMM.read(mapping, 3, 4) == bytes(4)


def test_growing_that_fails_changes_nothing(arena: VmmArena, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arena is as it was, and so is its export."""
    before = arena.export()
    monkeypatch.setenv("KVSTUB_FAIL", "cuMemCreate:1:2")
    with pytest.raises(InsufficientMemory):
        arena.grow(9 * UNIT)
    assert arena.export() == before
