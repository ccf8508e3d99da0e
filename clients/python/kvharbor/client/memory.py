"""A pool's memory in this process."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass

from kvharbor.client.descriptors import descriptor_from
from kvharbor.client.errors import PoolSizeMismatch, ServiceBug
from kvharbor.client.side import SideSocket
from kvharbor.gpumem import BlockViews, Descriptor, Mapping, MappingInUse
from kvharbor.v1 import types_pb2

HOST_ARENA = "host"


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """The mapping of a pool with its addresses and views; owned by the harbor that attached it."""

    pool_id: str
    descriptor: Descriptor
    mapping: Mapping
    views: BlockViews

    @classmethod
    def attach(cls, side: SideSocket, pool_id: str, *, writable: bool = True) -> "PoolMemory":
        """Asks for a pool's memory on the side socket and maps it."""
        with _attached(side, pool_id) as (message, fd):
            descriptor = descriptor_from(message)
            mapping = Mapping.attach(fd, descriptor.size_bytes, writable=writable)
            return cls(message.pool_id, descriptor, mapping, BlockViews(mapping, descriptor))

    def vacate(self) -> None:
        """Lets go of the memory; views stay readable and show nothing of any pool."""
        self.mapping.vacate()

    def replaced(self, side: SideSocket, pool_id: str) -> "PoolMemory":
        """Maps another pool's memory in the place of this one's, so that views show that; returns it.

        Raises PoolSizeMismatch unless layout and size are the same.
        """
        with _attached(side, pool_id) as (message, fd):
            descriptor = descriptor_from(message)
            if descriptor != self.descriptor:
                raise PoolSizeMismatch(
                    f"pool {message.name} has {descriptor.block_count} blocks in {descriptor.size_bytes} bytes in the "
                    f"new epoch, and had {self.descriptor.block_count} in {self.descriptor.size_bytes}: connect again",
                    metadata={
                        "sizeBytes": str(self.descriptor.size_bytes),
                        "currentSizeBytes": str(descriptor.size_bytes),
                    },
                )
            self.mapping.replace(fd)
            return dataclasses.replace(self, pool_id=pool_id)

    def close(self) -> None:
        """Lets go of the memory. While arrays or tensors over it live it stays mapped, until the last one goes."""
        self.views.close()
        # The session ends whatever the caller still refers to: raising here would only hide that.
        with contextlib.suppress(MappingInUse):
            self.mapping.close()


@contextlib.contextmanager
def _attached(side: SideSocket, pool_id: str) -> Iterator[tuple[types_pb2.PoolDescriptor, int]]:
    """Yields a pool's descriptor and its memory's file descriptor, which ends with the context."""
    message, fd = side.attach(pool_id)
    try:
        if message.arena_kind != HOST_ARENA:
            raise ServiceBug(f"the pool lies in a {message.arena_kind!r} arena: this client maps {HOST_ARENA!r} only")
        yield message, fd
    finally:
        os.close(fd)
