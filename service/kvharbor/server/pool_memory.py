"""The memory of one pool: the arena that workers map, and the ledger by which a later process finds its way in it."""

import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

from kvharbor.gpumem import Descriptor, HostArena, InsufficientMemory, left_memory, require_room
from kvharbor.gpumem import Mapping as ArenaMapping
from kvharbor.pool import Ledger, Pool, PoolConfig, ledger_bytes

OWN_BYTES_A_BLOCK = 96
"""What an empty pool keeps a block in this process."""


@dataclass(frozen=True, slots=True, eq=False)
class PoolMemory:
    """An arena, mapped here, and a ledger beside it, which nobody else maps. Owns both until `close`."""

    arena: HostArena
    mapping: ArenaMapping
    ledger: HostArena
    ledger_mapping: ArenaMapping

    @classmethod
    def reserved(cls, config: PoolConfig, descriptor: Descriptor, name: str, cancelled: Callable[[], bool]) -> Self:
        """Makes and reserves both; blocks for as long as the kernel takes to zero them.

        InsufficientMemory names the processes that still map memory of an earlier epoch, where there are some.
        """
        try:
            return cls._reserved(config, descriptor, name, cancelled)
        except InsufficientMemory as refusal:
            left = left_memory()
            raise (refusal.beside(left.held_bytes, left.held_by) if left.pids else refusal) from None

    @classmethod
    def _reserved(cls, config: PoolConfig, descriptor: Descriptor, name: str, cancelled: Callable[[], bool]) -> Self:
        needed_bytes = ledger_bytes(config)
        # Little beside real blocks; beside blocks of a few bytes it is what runs the host out of memory.
        require_room(descriptor.block_count * OWN_BYTES_A_BLOCK + needed_bytes)
        with (
            HostArena.create(needed_bytes, name=f"{name}-ledger") as ledger,
            HostArena.create(descriptor.size_bytes, name=name) as arena,
        ):
            for each in (ledger, arena):
                each.reserve(cancelled=cancelled)
            return cls.kept(config, descriptor, (arena.fd, ledger.fd))

    @classmethod
    def kept(cls, config: PoolConfig, descriptor: Descriptor, fds: tuple[int, int]) -> Self:
        """Takes up what an earlier process has reserved; the descriptors of arena and ledger stay the caller's."""
        arena = HostArena.opened(os.dup(fds[0]), size_bytes=descriptor.size_bytes)
        try:
            ledger = HostArena.opened(os.dup(fds[1]), size_bytes=ledger_bytes(config))
            try:
                return cls(arena, arena.map(), ledger, ledger.map())
            except BaseException:
                ledger.close()
                raise
        except BaseException:
            arena.close()
            raise

    @property
    def fds(self) -> tuple[int, int]:
        """The descriptors of arena and ledger, for `kept`."""
        return self.arena.fd, self.ledger.fd

    def close(self) -> None:
        """Gives the arena back, as far as nobody else maps it, and closes the ledger."""
        self.mapping.close()
        self.arena.close()
        self.ledger.close()

    def forget(self) -> None:
        """Gives the ledger's bytes back, although the pool that is being dropped still has it mapped."""
        self.ledger_mapping.region.madvise(mmap.MADV_REMOVE)


def pool_with_memory(
    config: PoolConfig, descriptor: Descriptor, name: str, cancelled: Callable[[], bool]
) -> tuple[Pool, PoolMemory]:
    """Makes an empty pool with its memory; blocks as `reserved` does."""
    memory = PoolMemory.reserved(config, descriptor, name, cancelled)
    try:
        return Pool(config, Ledger.create(config, memory.ledger_mapping.region)), memory
    except BaseException:
        memory.close()
        raise


def recovered_pool(
    config: PoolConfig, descriptor: Descriptor, fds: tuple[int, int], tenants: Mapping[int, str], first_number: int
) -> tuple[Pool, PoolMemory]:
    """Rebuilds a pool in the memory that an earlier process has kept; blocks for about 10 microseconds a block.

    `tenants` are those of the sessions that had it open; sequences and revisions count from `first_number`.
    """
    memory = PoolMemory.kept(config, descriptor, fds)
    try:
        ledger = Ledger.open(config, memory.ledger_mapping.region)
        pool = Pool.recovered(config, ledger, tenants, first_number=first_number, first_revision=first_number)
    except BaseException:
        memory.close()
        raise
    return pool, memory
