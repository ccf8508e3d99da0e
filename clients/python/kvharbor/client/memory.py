"""A pool's memory in this process."""

import contextlib
import dataclasses
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from kvharbor.client import descriptors, devices, frames, refusals
from kvharbor.client.calls import request, whole
from kvharbor.client.errors import DeviceNotVisible, InvalidField, PoolDevicesMismatch, PoolSizeMismatch
from kvharbor.client.ordering import NO_ORDER, DeviceOrder, StreamOrder
from kvharbor.client.side import SideSocket
from kvharbor.gpumem import (
    ArenaKind,
    BlockViews,
    Descriptor,
    Device,
    DeviceMapped,
    Export,
    GpumemError,
    Layout,
    Mapped,
    Mapping,
    MappingInUse,
    attach,
)
from kvharbor.v1 import side_pb2, types_pb2

if TYPE_CHECKING:
    ViewedMapping = Mapping | DeviceMapped


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """The mapping of one part of a pool, with its addresses and views; owned by the harbor that attached it.

    `devices` are the UUIDs of where the pool's parts lie, by rank; none for host memory.
    """

    pool_id: str
    part: int
    devices: tuple[str, ...]
    descriptor: Descriptor
    mapping: Mapped
    views: BlockViews

    @classmethod
    def attach(cls, side: SideSocket, pool_id: str, part: int, *, writable: bool = True) -> "PoolMemory":
        """Asks for a part of a pool on the side socket and maps it.

        Raises what the service refuses it with, and StateRefused, with the reason of the GpumemError that is its
        cause, when this process cannot map it.
        """
        with _attached(side, pool_id, part) as (message, export):
            return cls._mapped(message, export, part, writable=writable)

    @classmethod
    def attach_of_rank(cls, side: SideSocket, pool_id: str, rank: int, *, writable: bool) -> "PoolMemory":
        """Maps the part of a rank, or the one part of a pool whose layout has no ranks.

        Raises InvalidField for a rank that a layout with ranks has not: the part of another must not be written over.
        """
        try:
            return cls.attach(side, pool_id, rank, writable=writable)
        except InvalidField as refused:
            if not rank or refused.metadata.get("field") != "part":
                raise
            with _attached(side, pool_id, 0) as (message, export):
                if message.layout.tp_size > 1:
                    raise refused from None
                return cls._mapped(message, export, 0, writable=writable)

    @classmethod
    def _mapped(cls, message: types_pb2.PoolDescriptor, export: Export, part: int, *, writable: bool) -> "PoolMemory":
        descriptor = descriptors.descriptor_from(message)
        with _mapping():
            mapping = attach(export, writable=writable)
            views = BlockViews(cast("ViewedMapping", mapping), descriptor)
        return cls(message.pool_id, part, descriptors.devices_of(message), descriptor, mapping, views)

    @property
    def device(self) -> Device | None:
        """The device that it lies on, as this process sees it; None for host memory."""
        return None if self.mapping.kind is ArenaKind.HOST else cast("DeviceMapped", self.mapping).device

    @property
    def moves(self) -> bool:
        """Whether memory that takes the place of this one has other addresses, so that old views are void."""
        return self.mapping.kind is ArenaKind.CUDA_IPC

    def default_order(self) -> StreamOrder:
        """Returns what waits for the device, if there is one, before something is said of its blocks [C14]."""
        device = self.device
        return NO_ORDER if device is None else DeviceOrder(device)

    def vacate(self) -> None:
        """Lets go of the memory once the device has nothing to do any more.

        Views of host memory stay readable and show nothing of any pool; whoever touches device memory now breaks
        this process's CUDA context. Memory that `moves` must have no arrays or tensors over it any more: else raises
        StateRefused, MAPPING_IN_USE.
        """
        with _mapping():
            self._quieten()
            if self.moves:
                self.views.close()
            try:
                self.mapping.vacate()
            except MappingInUse:
                gc.collect()  # arrays in reference cycles
                self.mapping.vacate()

    def replaced(self, side: SideSocket, pool_id: str) -> "PoolMemory":
        """Maps another pool's memory in the place of this one's; returns it.

        Its views are those of this one, and show the new memory, unless the memory `moves`. Raises PoolSizeMismatch
        unless layout and size are the same, PoolDevicesMismatch unless the devices are.
        """
        with _attached(side, pool_id, self.part) as (message, export):
            self._require_same(message)
            with _mapping():
                self.mapping.replace(export)
                memory = self.with_new_views() if self.moves else self
            return dataclasses.replace(memory, pool_id=pool_id)

    def with_new_views(self) -> "PoolMemory":
        """Returns the memory with views of it that are open, whatever was closed before."""
        return dataclasses.replace(self, views=BlockViews(cast("ViewedMapping", self.mapping), self.descriptor))

    def close(self) -> None:
        """Lets go of the memory, once the device has nothing to do any more.

        While arrays or tensors over it live it stays mapped, until the last one goes.
        """
        self.views.close()
        with _mapping():
            self._quieten()
            # The session ends whatever the caller still refers to: raising here would only hide that.
            with contextlib.suppress(MappingInUse):
                self.mapping.close()

    def _quieten(self) -> None:
        # Memory that goes away under a kernel breaks the whole context.
        if (device := self.device) is not None:
            devices.synchronize(device)

    def _require_same(self, message: types_pb2.PoolDescriptor) -> None:
        descriptor, now = descriptors.descriptor_from(message), descriptors.devices_of(message)
        if descriptor != self.descriptor:
            raise PoolSizeMismatch(
                f"pool {message.name} has {descriptor.block_count} blocks in {descriptor.size_bytes} bytes in the "
                f"new epoch, and had {self.descriptor.block_count} in {self.descriptor.size_bytes}: connect again",
                metadata={"sizeBytes": str(self.descriptor.size_bytes), "currentSizeBytes": str(descriptor.size_bytes)},
            )
        if now != self.devices:
            raise PoolDevicesMismatch(
                f"pool {message.name} lies on {_named(now)} in the new epoch, and lay on {_named(self.devices)}: "
                f"connect again",
                metadata={"devices": ", ".join(self.devices), "currentDevices": ", ".join(now)},
            )


def checked_part(part: int, layout: Layout) -> int:
    """Returns a part that a pool of this layout has, or raises InvalidField."""
    part = whole("part", part)
    if not 0 <= part < layout.tp_size:
        raise InvalidField.of(
            "part", part, limit=f"a rank from 0 to {layout.tp_size - 1}", remedy="give the layout the engine's tp_size"
        )
    return part


def require_part(mapped: int, part: int) -> None:
    """Raises InvalidField when another part than the mapped one is asked for: a harbor has one of a pool."""
    if part != mapped:
        raise InvalidField.of(
            "part", part, limit=f"{mapped}, which is mapped", remedy="join the session once more for another part"
        )


def _named(uuids: tuple[str, ...]) -> str:
    return ", ".join(uuids) or "the host"


@contextlib.contextmanager
def _attached(side: SideSocket, pool_id: str, part: int) -> Iterator[tuple[types_pb2.PoolDescriptor, Export]]:
    """Yields a pool's descriptor and how to map a part of it; the file descriptors end with the context."""
    attached, fds = _asked(side, pool_id, part)
    try:
        yield attached.pool, descriptors.export_from(attached, fds)
    finally:
        frames.close_fds(fds)


def _asked(side: SideSocket, pool_id: str, part: int) -> tuple[side_pb2.Attached, tuple[int, ...]]:
    asked = request(side_pb2.Attach, pool_id=pool_id, part=part)
    try:
        return side.attach(asked)
    except DeviceNotVisible:
        # It lies on a device. Only now the driver is asked: whoever uses host memory need not have one.
        with _mapping():
            asked.device_view.CopyFrom(devices.device_view())
        return side.attach(asked)


@contextlib.contextmanager
def _mapping() -> Iterator[None]:
    """Turns what goes wrong with the memory into the client's errors."""
    try:
        yield
    except GpumemError as failure:
        raise refusals.from_memory(failure) from failure
