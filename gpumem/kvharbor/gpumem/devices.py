"""Devices by UUID: which of them this process sees, and their primary contexts.

An ordinal counts the devices that one process sees, in its own order; only a UUID means the same device to two
processes [M12].
"""

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from kvharbor.gpumem import driver
from kvharbor.gpumem.errors import DeviceFailed, DeviceNotVisible, InsufficientMemory


@dataclass(frozen=True, slots=True)
class Device:
    """A device that this process sees: its UUID for everybody, its ordinal for this process's own calls."""

    uuid: str
    ordinal: int
    name: str


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a device, as the driver counts them for all processes together."""

    free_bytes: int
    total_bytes: int


def visible_devices() -> tuple[Device, ...]:
    """Returns the devices that this process sees, by ordinal. Raises CudaUnavailable where it can see none."""
    driver.init()
    return tuple(_device(ordinal) for ordinal in range(driver.device_count()))


def device_of(uuid: str) -> Device:
    """Returns the device of that UUID, with or without its prefix. Raises DeviceNotVisible, CudaUnavailable."""
    visible = visible_devices()
    for device in visible:
        if same_device(device.uuid, uuid):
            return device
    raise DeviceNotVisible(uuid, [device.uuid for device in visible])


def same_device(uuid: str, other: str) -> bool:
    """Whether two UUIDs are of one device: prefix and case are those of the program that wrote them."""
    return _bare(uuid) == _bare(other)


def mps_client(device: Device) -> bool:
    """Whether this process's work on the device goes through a CUDA MPS server.

    Where the bindings or the driver do not know the attribute (both older than CUDA 12.2) the process counts as a
    client if an MPS daemon's control pipe is there.
    """
    driver.init()
    try:
        return bool(driver.device_attribute("MPS_ENABLED", device.ordinal))
    except AttributeError:
        return _mps_daemon_there()
    except DeviceFailed as failure:
        if failure.code != "CUDA_ERROR_INVALID_VALUE":
            raise
        return _mps_daemon_there()


@contextlib.contextmanager
def current(device: Device) -> Iterator[None]:
    """Makes the device's primary context this thread's for the block.

    The first use in a process retains the context, which takes some hundred milliseconds and as many MiB of the
    device unless another library has made it; it is kept until `release_context`.
    """
    driver.context_push(_contexts.retained(device.ordinal))
    try:
        yield
    finally:
        driver.context_pop()


def release_context(device: Device) -> None:
    """Gives back the device's primary context if `current` has retained it; repeated calls do nothing."""
    _contexts.release(device.ordinal)


def memory_of(device: Device) -> DeviceMemory:
    """Returns how much of the device's memory is free now; retains its context as `current` does."""
    with current(device):
        return DeviceMemory(*driver.mem_get_info())


@contextlib.contextmanager
def room_for(size_bytes: int, device: Device) -> Iterator[None]:
    """Raises InsufficientMemory, with what is free, where the device has no room for what the block takes of it.

    `size_bytes` is what the error says that was needed. Other failures come through.
    """
    try:
        yield
    except DeviceFailed as failure:
        if not failure.out_of_memory:
            raise
        free_bytes, limited_by = memory_of(device).free_bytes, f"device {device.uuid}"
        raise InsufficientMemory(size_bytes, available_bytes=free_bytes, limited_by=limited_by) from failure


class _Contexts:
    """The primary contexts that this process has retained, each once, by ordinal."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handles: dict[int, int] = {}

    def retained(self, ordinal: int) -> int:
        with self._lock:
            if ordinal not in self._handles:
                driver.init()
                self._handles[ordinal] = driver.primary_context_retain(ordinal)
            return self._handles[ordinal]

    def release(self, ordinal: int) -> None:
        with self._lock:
            if self._handles.pop(ordinal, None) is not None:
                driver.primary_context_release(ordinal)


_contexts = _Contexts()


def _device(ordinal: int) -> Device:
    name = driver.device_name(ordinal)
    # The driver does not say which kind a UUID is of; the name of a slice has its profile ("... MIG 1g.10gb").
    prefix = "MIG" if " MIG " in name else "GPU"
    return Device(f"{prefix}-{UUID(bytes=driver.device_uuid(ordinal))}", ordinal, name)


def _bare(uuid: str) -> str:
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def _mps_daemon_there() -> bool:
    return (Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")) / "control").exists()
