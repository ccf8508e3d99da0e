"""The kinds of arena that the contract is tested on. A new kind joins by its entry in KINDS."""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest

from kvharbor.gpumem import (
    Arena,
    Descriptor,
    Device,
    HostArena,
    IpcArena,
    VmmArena,
    copy_blocks,
    copy_blocks_on_device,
    device_of,
    driver,
    runtime_of,
    visible_devices,
)
from kvharbor.gpumem.devices import current

Pairs = list[tuple[int, int]]


class TestedKind(ABC):
    """How one kind of arena is made, and what a process can do that has it mapped: `mapped` is from `attach`."""

    __test__ = False

    read_only: ClassVar[bool] = True
    """Whether there are read-only mappings."""
    stays_in_place: ClassVar[bool] = True
    """Whether another arena can take the place of the first under living views."""
    on_hardware: ClassVar[bool] = False
    """Whether it needs a real device."""
    runtime: ClassVar[str] = "driver"
    """Whose calls CUDA IPC makes."""

    @abstractmethod
    def create(self, size_bytes: int, device: str = "") -> Arena:
        """Makes an arena, ready to export; on devices on the one of that UUID, the first one without it."""

    @abstractmethod
    def read(self, mapped: Any, offset_bytes: int, size_bytes: int) -> bytes:
        """Returns bytes of the arena."""

    @abstractmethod
    def write(self, mapped: Any, offset_bytes: int, content: bytes) -> None:
        """Puts bytes into the arena."""

    @abstractmethod
    def copy(self, mapped: Any, descriptor: Descriptor, pairs: Pairs) -> None:
        """Copies whole blocks."""

    @abstractmethod
    def store(self, mapped: Any) -> None:
        """Stores into the first byte whatever the mapping allows, as any code could that runs in the process."""

    @abstractmethod
    def view(self, mapped: Any) -> object:
        """Returns something that keeps the mapping open while it lives."""


class HostKind(TestedKind):
    """A memfd."""

    def create(self, size_bytes: int, device: str = "") -> Arena:
        arena = HostArena.create(size_bytes)
        arena.reserve()
        return arena

    def read(self, mapped: Any, offset_bytes: int, size_bytes: int) -> bytes:
        return bytes(mapped.buffer[offset_bytes : offset_bytes + size_bytes])

    def write(self, mapped: Any, offset_bytes: int, content: bytes) -> None:
        mapped.buffer[offset_bytes : offset_bytes + len(content)] = content

    def copy(self, mapped: Any, descriptor: Descriptor, pairs: Pairs) -> None:
        copy_blocks(mapped, descriptor, pairs)

    def store(self, mapped: Any) -> None:
        mapped.region[0] = 1

    def view(self, mapped: Any) -> object:
        return np.frombuffer(mapped.buffer, np.uint8)


class DeviceKind(TestedKind):
    """Memory on a device."""

    def place(self, device: str) -> Device:
        return device_of(device) if device else visible_devices()[0]

    def read(self, mapped: Any, offset_bytes: int, size_bytes: int) -> bytes:
        with current(mapped.device):
            return driver.read_bytes(mapped.address + offset_bytes, size_bytes)

    def write(self, mapped: Any, offset_bytes: int, content: bytes) -> None:
        with current(mapped.device):
            driver.write_bytes(mapped.address + offset_bytes, content)

    def copy(self, mapped: Any, descriptor: Descriptor, pairs: Pairs) -> None:
        with current(mapped.device):
            copy_blocks_on_device(mapped.address, descriptor, pairs, stream=0)

    def store(self, mapped: Any) -> None:
        # Where a kernel would: on the stub a device address is one of the process.
        ctypes.memset(mapped.address, 1, 1)

    def view(self, mapped: Any) -> object:
        return mapped.borrow()


class IpcKind(DeviceKind):
    """An allocation by its handle."""

    read_only = False
    stays_in_place = False

    def create(self, size_bytes: int, device: str = "") -> Arena:
        return IpcArena.create(size_bytes, self.place(device), runtime_of(self.runtime))


class VmmKind(DeviceKind):
    """Physical memory by descriptors."""

    def create(self, size_bytes: int, device: str = "") -> Arena:
        return VmmArena.create(size_bytes, self.place(device))


class OnHardware(DeviceKind):
    """The same on a real device."""

    on_hardware = True

    def store(self, mapped: Any) -> None:
        with current(mapped.device):
            driver.memset_async(mapped.address, 1, 1, 0)
            driver.stream_synchronize(0)


class IpcOnHardware(OnHardware, IpcKind):
    """An allocation of a real device."""


class IpcByCupyOnHardware(IpcOnHardware):
    """The same, made and opened by CuPy."""

    runtime = "cupy"


class VmmOnHardware(OnHardware, VmmKind):
    """Physical memory of a real device."""


KINDS: dict[str, TestedKind] = {
    "host": HostKind(),
    "cuda_ipc": IpcKind(),
    "cuda_vmm": VmmKind(),
    "cuda_ipc_on_hardware": IpcOnHardware(),
    "cuda_ipc_by_cupy_on_hardware": IpcByCupyOnHardware(),
    "cuda_vmm_on_hardware": VmmOnHardware(),
}


def kinds_where(holds: Callable[[TestedKind], bool]) -> list[Any]:
    """Names of kinds, for a parameter; those on hardware are marked."""
    return [
        pytest.param(name, marks=[pytest.mark.gpu] if kind.on_hardware else [])
        for name, kind in KINDS.items()
        if holds(kind)
    ]
