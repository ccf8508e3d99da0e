"""A pool's memory in this process."""

import contextlib
import os
from dataclasses import dataclass

from kvharbor.client.descriptors import descriptor_from
from kvharbor.client.errors import ServiceBug
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
    def attach(cls, side: SideSocket, pool_id: str) -> "PoolMemory":
        """Asks for a pool's memory on the side socket and maps it, writable."""
        message, fd = side.attach(pool_id)
        try:
            return cls._map(message, fd)
        finally:
            os.close(fd)

    @classmethod
    def _map(cls, message: types_pb2.PoolDescriptor, fd: int) -> "PoolMemory":
        if message.arena_kind != HOST_ARENA:
            raise ServiceBug(f"the pool lies in a {message.arena_kind!r} arena: this client maps {HOST_ARENA!r} only")
        descriptor = descriptor_from(message)
        mapping = Mapping.attach(fd, descriptor.size_bytes)
        return cls(message.pool_id, descriptor, mapping, BlockViews(mapping, descriptor))

    def close(self) -> None:
        """Lets go of the memory. While arrays or tensors over it live it stays mapped, until the last one goes."""
        self.views.close()
        # The session ends whatever the caller still refers to: raising here would only hide that.
        with contextlib.suppress(MappingInUse):
            self.mapping.close()
