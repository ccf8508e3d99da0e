"""The stub of the CUDA driver refuses what the real one refuses: code that is wrong must not pass on it."""

import ctypes
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

import cuda_stub
from kvharbor.gpumem import Device, DeviceFailed, device_of, driver
from kvharbor.gpumem.devices import current

UNIT = cuda_stub.GRANULARITY_BYTES


@pytest.fixture
def device(stub_devices: tuple[str, str]) -> Iterator[Device]:
    """A device whose context is current."""
    found, live = device_of(stub_devices[0]), cuda_stub.live_count()
    with current(found):
        yield found
    assert cuda_stub.live_count() == live


@pytest.fixture
def handle(device: Device) -> Iterator[int]:
    """Physical memory of two units."""
    made = driver.mem_create(2 * UNIT, device.ordinal)
    yield made
    driver.mem_release(made)


@pytest.fixture
def address(device: Device) -> Iterator[int]:
    """Four units of addresses."""
    reserved = driver.address_reserve(4 * UNIT, UNIT)
    yield reserved
    driver.address_free(reserved, 4 * UNIT)


@pytest.fixture
def mapped(handle: int, address: int) -> Iterator[int]:
    """The memory at the first two of the units, with access for nobody."""
    driver.mem_map(address, 2 * UNIT, handle)
    yield address
    driver.mem_unmap(address, 2 * UNIT)


def refused(code: str, call: Callable[[], object]) -> None:
    with pytest.raises(DeviceFailed, match=f"CUDA_ERROR_{code} "):
        call()


def test_sizes_are_whole_units_and_handles_are_live_ones(device: Device, handle: int) -> None:
    """Physical memory."""
    refused("INVALID_VALUE", lambda: driver.mem_create(UNIT + 1, device.ordinal))
    refused("INVALID_VALUE", lambda: driver.mem_create(0, device.ordinal))
    refused("INVALID_DEVICE", lambda: driver.mem_create(UNIT, 2))
    refused("OUT_OF_MEMORY", lambda: driver.mem_create(cuda_stub.DEVICE_BYTES + UNIT, device.ordinal))
    refused("INVALID_VALUE", lambda: driver.mem_release(handle + 8))
    refused("INVALID_VALUE", lambda: driver.mem_export_fd(handle + 8))
    with open("/dev/null") as other:  # noqa: PTH123 - a descriptor of anything else
        refused("INVALID_VALUE", lambda: driver.mem_import_fd(other.fileno()))


def test_a_range_is_freed_whole_and_empty(mapped: int) -> None:
    """Addresses."""
    refused("INVALID_VALUE", lambda: driver.address_free(mapped, 4 * UNIT))
    refused("INVALID_VALUE", lambda: driver.address_free(mapped, UNIT))
    refused("INVALID_VALUE", lambda: driver.address_free(mapped + UNIT, 3 * UNIT))


def test_memory_is_mapped_once_a_place_and_unmapped_as_it_was_mapped(handle: int, mapped: int) -> None:
    """Mappings."""
    refused("INVALID_VALUE", lambda: driver.mem_map(mapped + UNIT, UNIT, handle))
    refused("INVALID_VALUE", lambda: driver.mem_map(mapped + 3 * UNIT, 2 * UNIT, handle))
    refused("INVALID_VALUE", lambda: driver.mem_map(mapped + 2 * UNIT, UNIT, handle + 8))
    refused("INVALID_VALUE", lambda: driver.mem_unmap(mapped, UNIT))
    refused("INVALID_VALUE", lambda: driver.mem_unmap(mapped + 2 * UNIT, UNIT))


def test_access_is_given_to_what_is_mapped(device: Device, mapped: int) -> None:
    """Without it the driver's own copies are refused too."""
    refused("ILLEGAL_ADDRESS", lambda: driver.read_bytes(mapped, 1))
    refused("INVALID_VALUE", lambda: driver.set_access(mapped, 3 * UNIT, device.ordinal, writable=True))
    driver.set_access(mapped, 2 * UNIT, device.ordinal, writable=False)
    assert len(driver.read_bytes(mapped, 2 * UNIT)) == 2 * UNIT
    refused("ILLEGAL_ADDRESS", lambda: driver.read_bytes(mapped, 2 * UNIT + 1))
    refused("ILLEGAL_ADDRESS", lambda: driver.write_bytes(mapped, b"x"))
    refused("ILLEGAL_ADDRESS", lambda: driver.memset_async(mapped, 0, 1, 0))


def test_a_device_address_is_one_of_the_process(device: Device, mapped: int) -> None:
    """What lets a test stand in for a kernel."""
    driver.set_access(mapped, 2 * UNIT, device.ordinal, writable=True)
    driver.write_bytes(mapped, bytes(5))
    ctypes.memset(mapped + 1, 7, 3)
    assert driver.read_bytes(mapped, 5) == b"\0\7\7\7\0"


def test_plain_memory_is_freed_once_and_by_its_base(device: Device) -> None:
    """cuMemAlloc and cuMemFree."""
    allocation = driver.mem_alloc(100)
    refused("INVALID_VALUE", lambda: driver.mem_free(allocation + 4))
    driver.mem_free(allocation)
    refused("INVALID_VALUE", lambda: driver.mem_free(allocation))
    refused("OUT_OF_MEMORY", lambda: driver.mem_alloc(cuda_stub.DEVICE_BYTES + 1))


def test_a_handle_is_of_plain_memory_and_not_for_its_own_process(device: Device, mapped: int) -> None:
    """cuIpcGetMemHandle and cuIpcOpenMemHandle; tests/unit/test_gpumem_ipc_mapping.py opens them elsewhere."""
    allocation = driver.mem_alloc(100)
    own = driver.ipc_get_handle(allocation)
    refused("INVALID_CONTEXT", lambda: driver.ipc_open_handle(own))
    refused("INVALID_HANDLE", lambda: driver.ipc_open_handle(bytes(64)))
    refused("INVALID_VALUE", lambda: driver.ipc_get_handle(mapped))
    refused("INVALID_VALUE", lambda: driver.ipc_close_handle(allocation))
    driver.mem_free(allocation)


def test_memory_and_streams_want_a_current_context(stub_devices: tuple[str, str]) -> None:
    """Each thread's own."""
    driver.init()
    refused("INVALID_CONTEXT", lambda: driver.mem_alloc(1))
    refused("INVALID_CONTEXT", driver.stream_create)
    refused("INVALID_CONTEXT", driver.mem_get_info)
    refused("INVALID_CONTEXT", driver.context_pop)


def test_only_streams_that_were_made_are_waited_for(device: Device) -> None:
    """And destroyed, once."""
    stream = driver.stream_create()
    driver.stream_synchronize(stream)
    driver.stream_destroy(stream)
    refused("INVALID_HANDLE", lambda: driver.stream_synchronize(stream))
    refused("INVALID_HANDLE", lambda: driver.stream_destroy(stream))


def test_a_copy_in_two_dimensions_has_rows_that_fit_their_pitch(device: Device) -> None:
    """And a pitch that the device can do."""

    def copy(width_bytes: int, pitch_bytes: int) -> None:
        driver.memcpy_2d_async(
            allocation, allocation + 50, width_bytes=width_bytes, height=2, pitch_bytes=pitch_bytes, stream=0
        )

    allocation = driver.mem_alloc(100)
    copy(16, 32)
    refused("INVALID_VALUE", lambda: copy(17, 16))
    refused("INVALID_VALUE", lambda: copy(16, 2**31))
    refused("ILLEGAL_ADDRESS", lambda: copy(16, 48))
    driver.mem_free(allocation)


def test_a_call_takes_as_long_as_it_is_told_to(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what a slow device holds up."""
    monkeypatch.setenv("KVSTUB_SLOW", "cuCtxSynchronize:0.05")
    began_at = time.monotonic()
    driver.context_synchronize()
    assert time.monotonic() - began_at >= 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    ("visible", "expected"), [("1", "1"), ("1,0", "1 0"), ("{1},0", "1 0"), ("0,7,1", "0"), ("0,-1", "0")]
)
def test_visible_devices_are_those_of_the_variable(visible: str, expected: str, stub_devices: tuple[str, str]) -> None:
    """By ordinal or UUID; whatever comes after one that names no device is not visible."""
    code = "from kvharbor.gpumem import visible_devices; print(*(device.uuid for device in visible_devices()))"
    environment = cuda_stub.environment(stub_devices, visible=visible.format(*stub_devices))
    shown = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
    ).stdout.split()
    assert shown == [stub_devices[int(number)] for number in expected.split()]
