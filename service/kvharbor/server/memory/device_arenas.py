"""Memory of devices for pools: in chunks that the supervisor keeps, or in allocations that a process a device keeps."""

import abc
import asyncio
from collections.abc import Callable, Mapping, Sequence

import structlog

from kvharbor.gpumem import (
    ArenaKind,
    DeviceFailed,
    Export,
    InsufficientMemory,
    ReservationCancelled,
    VmmArena,
    device_of,
)
from kvharbor.gpumem.devices import release_context
from kvharbor.gpumem.errors import ArenaUnproven
from kvharbor.gpumem.two_process import require_arena
from kvharbor.server.errors import StartupError
from kvharbor.server.memory.device_keepers import DeviceKeepers
from kvharbor.server.memory.part import DevicePart, Part
from kvharbor.server.memory.work_thread import DeviceThread, refusing_for_room

log = structlog.get_logger(__name__)

_ROOM_REMEDY = (
    "ask for less, or come again when other processes have let go: those that are on the device, among them perhaps "
    "workers that still map memory of an earlier epoch"
)

Threads = Mapping[str, DeviceThread]
"""One a device, by UUID."""


class DeviceArenas(abc.ABC):
    """What both kinds have in common: threads, the trial at the start, and making all parts or none."""

    kind: ArenaKind

    def __init__(self, threads: Threads, *, grace_s: float) -> None:
        self.grace_s = grace_s
        self._threads = threads

    async def try_out(self) -> None:
        """Has another process map and read memory of this kind on each device, once; raises StartupError.

        Whether memory can be shared is decided when it is allocated: that is found out before anybody relies on it.
        """
        try:
            await asyncio.gather(*(asyncio.to_thread(_tried_out, self.kind, uuid) for uuid in self._threads))
        except (ArenaUnproven, DeviceFailed) as refused:
            raise StartupError(f"setting arena: {refused}") from None
        log.info("arena tried out", arena=self.kind, devices=[*self._threads])

    async def make(
        self,
        places: Sequence[str],
        size_bytes: int,
        name: str,  # noqa: ARG002 - nothing shows a name on a device
        cancelled: Callable[[], bool],
    ) -> tuple[Part, ...]:
        """As Arenas says."""
        made: list[Part] = []
        try:
            for place in places:
                if cancelled():
                    raise ReservationCancelled(len(made) * size_bytes, size_bytes=len(places) * size_bytes)
                made.append(await self._made(place, size_bytes, cancelled))
        except BaseException as failure:
            for part in made:
                await part.close()
                await part.free()
            raise _told(failure) from None
        return tuple(made)

    @abc.abstractmethod
    async def _made(self, device: str, size_bytes: int, cancelled: Callable[[], bool]) -> Part:
        """Makes one part."""

    def close(self) -> None:
        """As Arenas says."""
        for thread in self._threads.values():
            thread.close()


class VmmArenas(DeviceArenas):
    """Chunks of device memory, made here; their descriptors are all that keeps them, so they outlive this process."""

    kind = ArenaKind.CUDA_VMM

    async def start(self) -> None:
        """As Arenas says; there is nothing to do."""

    def take_up(self, export: Export, allocation: str) -> Part:  # noqa: ARG002 - the signature is the protocol's
        """As Arenas says; no context is needed for it."""
        return DevicePart(export, self._threads[export.device])

    async def _made(self, device: str, size_bytes: int, cancelled: Callable[[], bool]) -> Part:  # noqa: ARG002
        thread = self._threads[device]
        arena = await thread.run(lambda: _created(size_bytes, device))
        return DevicePart(arena.export(), thread)


class IpcArenas(DeviceArenas):
    """Allocations of the devices' keepers, whose handles this process opens as workers do.

    `allocations` are those of pools that an earlier process has made and kept.
    """

    kind = ArenaKind.CUDA_IPC

    def __init__(self, threads: Threads, keepers: DeviceKeepers, allocations: Sequence[str], *, grace_s: float) -> None:
        super().__init__(threads, grace_s=grace_s)
        self._keepers = keepers
        self._allocations = allocations

    async def start(self) -> None:
        """As Arenas says."""
        await self._keepers.start(self._allocations)

    def take_up(self, export: Export, allocation: str) -> Part:
        """As Arenas says; it is opened when there is something to copy."""
        device = export.device
        thread = self._threads[device]
        return DevicePart(export, thread, allocation=allocation, free=lambda name: self._keepers.free(device, name))

    def close(self) -> None:
        """As Arenas says."""
        super().close()
        self._keepers.close()

    async def _made(self, device: str, size_bytes: int, cancelled: Callable[[], bool]) -> Part:
        allocation, export = await self._keepers.allocate(device, size_bytes, cancelled)
        return self.take_up(export, allocation)


def _tried_out(kind: ArenaKind, uuid: str) -> None:
    try:
        require_arena(kind, uuid)
    finally:
        # A service that copies nothing needs none.
        release_context(device_of(uuid))


def _created(size_bytes: int, uuid: str) -> VmmArena:
    """Makes an arena and zeroes it, in a context for which the device may have no room either."""
    with refusing_for_room(uuid, size_bytes, _ROOM_REMEDY):
        return VmmArena.create(size_bytes, device_of(uuid))


def _told(failure: BaseException) -> BaseException:
    """Returns a lack of room as one that says what may have it; anything else as it is."""
    if not isinstance(failure, InsufficientMemory):
        return failure
    return InsufficientMemory(
        failure.needed_bytes,
        available_bytes=failure.available_bytes,
        limited_by=failure.limited_by,
        remedy=_ROOM_REMEDY,
    )
