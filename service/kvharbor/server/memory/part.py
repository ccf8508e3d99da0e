"""One part of a pool's memory, as the service has it: what others need to map it, and a mapping of its own for copies.

A pool has a part a rank, with the same blocks in each. The service maps a part as a worker does, when it has something
to copy there for the first time: one that copies nothing needs no mapping, and no context of a device.
"""

import abc
import contextlib
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import cast

from kvharbor.gpumem import (
    Descriptor,
    DeviceMapped,
    Export,
    Mapped,
    Mapping,
    attach,
    copy_blocks,
    copy_blocks_on_device,
)
from kvharbor.gpumem.devices import current
from kvharbor.server.memory.work_thread import DeviceThread, WorkThread, refusing_for_room

Pairs = Sequence[tuple[int, int]]
"""Blocks to copy: (source, destination)."""

CONTEXT_BYTES = 512 * 2**20
"""About what a context takes of a device; not seen on hardware."""
_CONTEXT_REMEDY = "leave room on the device, beside the pools, for the service's own context"

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
        await self.thread.run(lambda: self._copy(descriptor, pairs))

    async def close(self) -> None:
        """Lets go of what this process has of it. The memory lives on while anybody else has it."""
        await self.thread.run(self._let_go)

    async def free(self) -> None:
        """Gives memory back that does not go with its last descriptor. For a dropped pool, after `close`."""
        if self._free is not None:
            await self._free(self.allocation)

    @abc.abstractmethod
    def _copy(self, descriptor: Descriptor, pairs: Pairs) -> None:
        """Copies, on the thread."""

    def _mapped(self) -> Mapped:
        if self._mapping is None:
            self._mapping = attach(self.export)
        return self._mapping

    def _let_go(self) -> None:
        try:
            if self._mapping is not None:
                self._mapping.close()
        finally:
            for fd in self.export.fds:
                os.close(fd)


class HostPart(Part):
    """Host memory, with a thread of its own."""

    def __init__(self, export: Export) -> None:
        super().__init__(export, WorkThread("copy"))

    async def close(self) -> None:
        await super().close()
        self.thread.close()

    def _copy(self, descriptor: Descriptor, pairs: Pairs) -> None:
        copy_blocks(cast(Mapping, self._mapped()), descriptor, pairs)


class DevicePart(Part):
    """Memory of a device, on the device's thread.

    `copy` raises InsufficientMemory where the device has no room for what the first copy makes, before anything is
    queued. From then on no failure is a refusal: a copy still under way would write into a block that is free by then.
    """

    def __init__(self, export: Export, thread: DeviceThread, *, allocation: str = "", free: Free | None = None) -> None:
        super().__init__(export, thread, allocation=allocation, free=free)
        self._device_thread = thread

    def _copy(self, descriptor: Descriptor, pairs: Pairs) -> None:
        with contextlib.ExitStack() as leave:
            with refusing_for_room(self.export.device, CONTEXT_BYTES, _CONTEXT_REMEDY):
                mapping = cast(DeviceMapped, self._mapped())
                leave.enter_context(current(mapping.device))
                stream = self._device_thread.stream()
            copy_blocks_on_device(mapping.address, descriptor, pairs, stream=stream)
