"""One part of a pool's memory, as the service has it: what others need to map it, and a mapping of its own for copies.

A pool has a part a rank, with the same blocks in each. The service maps a part as a worker does, when it has something
to copy there for the first time: one that copies nothing needs no mapping, and no context of a device.
"""

import abc
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import cast

from kvharbor.gpumem import (
    Descriptor,
    DeviceFailed,
    DeviceMapped,
    Export,
    InsufficientMemory,
    Mapped,
    Mapping,
    attach,
    copy_blocks,
    copy_blocks_on_device,
)
from kvharbor.gpumem.devices import current
from kvharbor.server.work_thread import DeviceThread, WorkThread

Pairs = Sequence[tuple[int, int]]
"""Blocks to copy: (source, destination)."""

CONTEXT_BYTES = 512 * 2**20
"""About what a context takes of a device; not seen on hardware."""

Free = Callable[[str], Awaitable[None]]
"""Asks the keeper of a device to free an allocation."""


class Part(abc.ABC):
    """Owns the descriptors of `export`, and a mapping, until `close`. In this process only `thread` touches the memory.

    `allocation` is the memory's name with the keeper of its device, empty where there is none.
    """

    def __init__(self, export: Export, thread: WorkThread, *, allocation: str = "", free: Free | None = None) -> None:
        self.export = export
        self.thread = thread
        self.allocation = allocation
        self._free = free
        self._mapping: Mapped | None = None

    async def copy(self, descriptor: Descriptor, pairs: Pairs) -> None:
        """Copies whole blocks inside the part, after what is under way there; returns when they are complete."""
        await self.thread.run(lambda: self._copy(self._mapped(), descriptor, pairs))

    async def close(self) -> None:
        """Lets go of what this process has of it. The memory lives on while anybody else has it."""
        await self.thread.run(self._let_go)

    async def free(self) -> None:
        """Gives memory back that does not go with its last descriptor. For a dropped pool, after `close`."""
        if self._free is not None:
            await self._free(self.allocation)

    @abc.abstractmethod
    def _copy(self, mapping: Mapped, descriptor: Descriptor, pairs: Pairs) -> None:
        """Copies, on the thread."""

    def _mapped(self) -> Mapped:
        if self._mapping is None:
            self._mapping = attach(self.export)
        return self._mapping

    def _let_go(self) -> None:
        if self._mapping is not None:
            self._mapping.close()
        for fd in self.export.fds:
            os.close(fd)


class HostPart(Part):
    """Host memory, with a thread of its own."""

    def __init__(self, export: Export) -> None:
        super().__init__(export, WorkThread("copy"))

    async def close(self) -> None:
        await super().close()
        self.thread.close()

    def _copy(self, mapping: Mapped, descriptor: Descriptor, pairs: Pairs) -> None:
        copy_blocks(cast(Mapping, mapping), descriptor, pairs)


class DevicePart(Part):
    """Memory of a device, on the device's thread."""

    def __init__(self, export: Export, thread: DeviceThread, *, allocation: str = "", free: Free | None = None) -> None:
        super().__init__(export, thread, allocation=allocation, free=free)
        self._device_thread = thread

    async def copy(self, descriptor: Descriptor, pairs: Pairs) -> None:
        """As Part says; raises InsufficientMemory where the device has no room for what the first copy makes."""
        try:
            await super().copy(descriptor, pairs)
        except DeviceFailed as failure:
            if not failure.out_of_memory:
                raise
            raise InsufficientMemory(
                CONTEXT_BYTES,
                available_bytes=0,
                limited_by=f"device {self.export.device} ({failure.call})",
                remedy="leave room on the device, beside the pools, for the service's own context",
            ) from None

    def _copy(self, mapping: Mapped, descriptor: Descriptor, pairs: Pairs) -> None:
        on_device = cast(DeviceMapped, mapping)
        with current(on_device.device):
            stream = self._device_thread.stream()
            copy_blocks_on_device(on_device.address, descriptor, pairs, stream=stream)
