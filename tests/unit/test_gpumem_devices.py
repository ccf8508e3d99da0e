"""Devices by UUID and the thin layer over the driver, on its stub; and a process without any driver."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

import cuda_stub
from kvharbor.gpumem import (
    Device,
    DeviceFailed,
    DeviceNotVisible,
    device_of,
    driver,
    mps_client,
    visible_devices,
)
from kvharbor.gpumem.devices import current, memory_of, release_context


@pytest.fixture
def device(stub_devices: tuple[str, str]) -> Device:
    return device_of(stub_devices[1])


def in_another_process(code: str, environment: dict[str, str] | None = None) -> str:
    """Returns what the code prints in an interpreter of its own."""
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_devices_are_in_the_order_of_this_processs_ordinals(stub_devices: tuple[str, str]) -> None:
    """With the UUIDs as everybody else writes them."""
    assert [(device.uuid, device.ordinal) for device in visible_devices()] == [
        (stub_devices[0], 0),
        (stub_devices[1], 1),
    ]


@pytest.mark.parametrize("spelt", [str.upper, lambda uuid: uuid.removeprefix("GPU-"), lambda uuid: f"MIG-{uuid[4:]}"])
def test_a_device_is_found_however_its_uuid_is_spelt(spelt: object, stub_devices: tuple[str, str]) -> None:
    """Tools differ in the prefix and in capitals; the number is the same."""
    assert device_of(spelt(stub_devices[1])).ordinal == 1  # type: ignore[operator]


@pytest.mark.slow
def test_a_uuid_with_a_zero_byte_is_whole() -> None:
    """Text of C ends at a zero; a UUID does not."""
    uuid = "GPU-00ff0000-0000-0000-0000-00000000007f"
    code = "from kvharbor.gpumem import visible_devices; print(*(d.uuid for d in visible_devices()))"
    assert in_another_process(code, cuda_stub.environment([uuid])) == uuid


@pytest.mark.slow
def test_a_slice_of_a_device_is_called_one() -> None:
    """MIG devices have UUIDs of their own kind; their names say what they are."""
    slice_uuid = f"MIG-{cuda_stub.new_uuid()[4:]}"
    code = "from kvharbor.gpumem import visible_devices; print(*(d.uuid for d in visible_devices()))"
    assert in_another_process(code, cuda_stub.environment([slice_uuid])) == slice_uuid


def test_a_device_that_is_not_visible_is_refused_by_name(stub_devices: tuple[str, str]) -> None:
    """F5: the error names both sides."""
    with pytest.raises(DeviceNotVisible) as refusal:
        device_of("GPU-1")
    assert refusal.value.metadata()["device"] == "GPU-1"
    assert refusal.value.metadata()["visibleDevices"] == ", ".join(stub_devices)


def test_a_context_is_current_for_the_block_and_in_its_thread_only(device: Device) -> None:
    """Nested blocks restore the device of the outer one."""
    outer = visible_devices()[0]
    with current(outer):
        with current(device):
            assert driver.context_device() == device.ordinal
        assert driver.context_device() == outer.ordinal
        elsewhere: list[Exception] = []

        def ask() -> None:
            try:
                driver.context_device()
            except DeviceFailed as failure:
                elsewhere.append(failure)

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        assert [str(failure) for failure in elsewhere] == [
            "cuCtxGetDevice failed with CUDA_ERROR_INVALID_CONTEXT (invalid device context)"
        ]
    with pytest.raises(DeviceFailed, match="INVALID_CONTEXT"):
        driver.context_device()


def test_a_context_ends_its_turn_when_the_block_fails(device: Device) -> None:
    """The thread has the context that it had before."""
    with pytest.raises(ZeroDivisionError), current(device):
        _ = 1 / 0
    with pytest.raises(DeviceFailed, match="INVALID_CONTEXT"):
        driver.context_device()


def test_a_context_that_was_given_back_is_retained_again(device: Device) -> None:
    """Releasing twice gives back once."""
    with current(device):
        pass
    release_context(device)
    release_context(device)
    assert memory_of(device).total_bytes == cuda_stub.DEVICE_BYTES


@pytest.mark.parametrize("share", ["0", "1"])
def test_a_client_of_mps_is_known(share: str, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver says so."""
    monkeypatch.setenv("KVSTUB_MPS", share)
    assert mps_client(device) is (share == "1")


@pytest.mark.parametrize("there", [False, True])
def test_where_the_driver_cannot_tell_an_mps_daemons_pipe_does(
    there: bool, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown attribute is not taken for a no."""
    monkeypatch.setenv("KVSTUB_FAIL", "cuDeviceGetAttribute:1:1")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    if there:
        (tmp_path / "control").touch()
    assert mps_client(device) is there


def test_another_failure_of_the_driver_is_not_taken_for_an_answer(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only an attribute that it does not know has another way."""
    monkeypatch.setenv("KVSTUB_FAIL", "cuDeviceGetAttribute:1:999")
    with pytest.raises(DeviceFailed, match="CUDA_ERROR_UNKNOWN"):
        mps_client(device)


def test_only_a_whole_handle_is_opened(stub_devices: tuple[str, str]) -> None:
    """The driver would read 64 bytes wherever they are."""
    with pytest.raises(ValueError, match="an IPC handle has 64 bytes, this has 63"):
        driver.ipc_open_handle(bytes(63))


@pytest.mark.slow
def test_importing_gpumem_imports_no_cuda() -> None:
    """A host without a device needs neither the packages nor the library."""
    code = (
        "import sys, kvharbor.gpumem; print([name for name in sys.modules if name.split('.')[0] in ('cuda', 'cupy')])"
    )
    assert in_another_process(code) == "[]"


NO_CUDA = """
from kvharbor.gpumem import CudaUnavailable, visible_devices
try:
    visible_devices()
except CudaUnavailable as refusal:
    print(refusal)
"""


@pytest.mark.slow
def test_a_machine_without_the_package_is_told_to_install_it() -> None:
    """Not an ImportError from somewhere inside."""
    code = f"import sys; sys.modules['cuda.bindings'] = None{NO_CUDA}"
    assert in_another_process(code).startswith("CUDA is not available: the Python package cuda.bindings")


@pytest.mark.slow
def test_a_machine_without_a_device_says_so_in_the_drivers_words() -> None:
    """The library is there and has nothing to drive."""
    said = in_another_process(NO_CUDA, cuda_stub.environment([]))
    assert "cuInit failed with CUDA_ERROR_NO_DEVICE (no CUDA-capable device is detected)" in said


@pytest.mark.slow
def test_a_process_that_is_shown_no_device_has_none(stub_devices: tuple[str, str]) -> None:
    """An empty CUDA_VISIBLE_DEVICES hides them all."""
    assert "NO_DEVICE" in in_another_process(NO_CUDA, cuda_stub.environment(stub_devices, visible=""))
