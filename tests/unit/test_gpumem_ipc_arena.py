"""What only the cuda_ipc arena promises to the process that owns it, on the stub of the driver."""

from collections.abc import Iterator

import pytest

import cuda_stub
from kvharbor.gpumem import (
    ArenaClosed,
    Device,
    DeviceFailed,
    InsufficientMemory,
    IpcArena,
    IpcMapping,
    IpcRefused,
    LayoutInvalid,
    device_of,
    driver,
)
from kvharbor.gpumem.devices import current, memory_of

MIB = 2**20
SIZE_BYTES = 3 * MIB


@pytest.fixture
def device(stub_devices: tuple[str, str]) -> Device:
    return device_of(stub_devices[1])


@pytest.fixture(autouse=True)
def _nothing_is_left_on_the_device(device: Device, no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing that lives in the driver, and no memory."""
    monkeypatch.setenv("KVHARBOR_CUDA_RUNTIME", "driver")
    before = cuda_stub.live_count(), memory_of(device).free_bytes
    yield
    assert (cuda_stub.live_count(), memory_of(device).free_bytes) == before


def test_the_exporting_process_is_told_to_use_its_memory_directly(device: Device) -> None:
    """F4: the driver would answer with a bare code; the address works in this process, and a child is no owner."""
    with IpcArena.create(SIZE_BYTES, device) as arena:
        with pytest.raises(IpcRefused, match=r"it is its own: use the memory at IpcArena.address"):
            IpcMapping.attach(arena.export())
        with current(device):
            assert driver.read_bytes(arena.address, 4) == bytes(4)


def test_an_allocation_is_whole_pieces_of_two_mebibytes(device: Device) -> None:
    """CUDA cuts smaller ones from a common piece, all of which a handle would give away."""
    free_bytes = memory_of(device).free_bytes
    with IpcArena.create(1, device) as arena:
        assert (arena.size_bytes, free_bytes - memory_of(device).free_bytes) == (1, 2 * MIB)
    with IpcArena.create(2 * MIB + 1, device):
        assert free_bytes - memory_of(device).free_bytes == 4 * MIB
    assert memory_of(device).free_bytes == free_bytes


def test_an_arena_that_has_no_room_is_refused_by_its_device(device: Device) -> None:
    """A full device breaks nothing, so it is not a failure of the device; the error says what is left."""
    with pytest.raises(InsufficientMemory) as refused:
        IpcArena.create(cuda_stub.DEVICE_BYTES + 1, device)
    assert refused.value.available_bytes == memory_of(device).free_bytes
    assert refused.value.limited_by == f"device {device.uuid}"


@pytest.mark.parametrize("call", ["cuMemAlloc", "cuMemsetD8Async", "cuCtxSynchronize", "cuIpcGetMemHandle"])
def test_an_arena_that_cannot_be_made_takes_no_memory(
    device: Device, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Every step undoes the ones before it, and the next arena is made as if nothing had been."""
    free_bytes = memory_of(device).free_bytes
    with monkeypatch.context() as failing:
        failing.setenv("KVSTUB_FAIL", f"{call}:1")
        with pytest.raises(DeviceFailed, match=f"{call}.* failed"):
            IpcArena.create(SIZE_BYTES, device)
    assert memory_of(device).free_bytes == free_bytes
    IpcArena.create(SIZE_BYTES, device).close()


@pytest.mark.parametrize("size_bytes", [0, -1, 2**48])
def test_an_arena_of_no_size_is_refused(device: Device, size_bytes: int) -> None:
    """M3: before anything is asked of the device."""
    with pytest.raises(LayoutInvalid, match="size_bytes"):
        IpcArena.create(size_bytes, device)


def test_a_closed_arena_says_so(device: Device) -> None:
    """Closing twice is nothing; using what is closed is a typed error."""
    arena = IpcArena.create(SIZE_BYTES, device)
    for _ in range(2):
        arena.close()
    for use in (lambda: arena.address, arena.export):
        with pytest.raises(ArenaClosed, match="this arena is closed"):
            use()
