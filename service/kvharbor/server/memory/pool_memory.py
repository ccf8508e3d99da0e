"""The memory of one pool: its parts, which workers map, and the ledger by which a later process finds its way there."""

import asyncio
import contextlib
import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Self

from kvharbor.gpumem import Descriptor, HostArena, InsufficientMemory, left_memory, require_room
from kvharbor.gpumem import Mapping as ArenaMapping
from kvharbor.pool import Ledger, Pool, PoolConfig, ledger_bytes
from kvharbor.server.memory.part import Pairs, Part

OWN_BYTES_A_BLOCK = 80
"""What an empty pool keeps a block in this process."""


@dataclass(frozen=True, slots=True, eq=False)
class LedgerMemory:
    """The ledger's memory, mapped here and nowhere else. Owns both until `close`."""

    arena: HostArena
    mapping: ArenaMapping

    @classmethod
    def reserved(cls, config: PoolConfig, name: str, cancelled: Callable[[], bool]) -> Self:
        """Makes and reserves it; blocks for as long as the kernel takes to zero it.

        Raises InsufficientMemory where there is no room for it and for what the pool keeps in this process.
        """
        needed_bytes = ledger_bytes(config)
        # Little beside real blocks; beside blocks of a few bytes it is what runs the host out of memory.
        block_count = config.block_count + config.scratch_blocks
        require_room(block_count * OWN_BYTES_A_BLOCK + needed_bytes)
        arena = HostArena.create(needed_bytes, name=f"{name}-ledger")
        try:
            arena.reserve(cancelled=cancelled)
            return cls(arena, arena.map())
        except BaseException:
            arena.close()
            raise

    @classmethod
    def kept(cls, config: PoolConfig, fd: int) -> Self:
        """Takes over the descriptor of what an earlier process has reserved."""
        arena = HostArena.opened(fd, size_bytes=ledger_bytes(config))
        try:
            return cls(arena, arena.map())
        except BaseException:
            arena.close()
            raise

    def close(self) -> None:
        """Closes the descriptor. The mapping stays as long as the pool, whose columns are views of it."""
        self.arena.close()

    def forget(self) -> None:
        """Gives the bytes back, for a pool that is dropped or never came to be: zeros are mapped in their place.

        The pool's views stay, as whoever still has the pool may read. What is mapped without a descriptor is taken for
        what an earlier owner has left.
        """
        self.mapping.region.madvise(mmap.MADV_REMOVE)
        self.mapping.vacate()


@dataclass(frozen=True, slots=True, eq=False)
class PoolMemory:
    """The parts of a pool, by rank, and its ledger. Owns them until `close`."""

    parts: tuple[Part, ...]
    ledger: LedgerMemory

    async def copy(self, descriptor: Descriptor, pairs: Pairs) -> None:
        """Copies whole blocks in every part; returns when all are complete [S26].

        Raises the first failure, and only when nothing writes any more: the destinations may be another's then.
        """
        copies = [part.copy(descriptor, pairs) for part in self.parts]
        for failure in await asyncio.gather(*copies, return_exceptions=True):
            if failure is not None:
                raise failure

    async def close(self) -> None:
        """Lets go of everything: of the parts as far as nobody else has them mapped, and of the ledger."""
        await asyncio.gather(*(part.close() for part in self.parts))
        self.ledger.close()

    async def give_back(self) -> None:
        """Gives back what does not go with the descriptors. For a dropped pool, after `close`."""
        # First, as a device may take its time: nobody is to see a mapping without its descriptor meanwhile.
        await asyncio.to_thread(self.ledger.forget)
        await asyncio.gather(*(part.free() for part in self.parts))


@contextlib.contextmanager
def naming_left_memory() -> Iterator[None]:
    """Has InsufficientMemory name the processes that still map host memory of an earlier epoch, if there are any."""
    try:
        yield
    except InsufficientMemory as refusal:
        left = left_memory()
        raise (refusal.beside(left.held_bytes, left.held_by) if left.shares else refusal) from None


def pool_with_ledger(config: PoolConfig, name: str, cancelled: Callable[[], bool]) -> tuple[Pool, LedgerMemory]:
    """Makes an empty pool with its ledger; blocks as `LedgerMemory.reserved` does."""
    with naming_left_memory():
        ledger = LedgerMemory.reserved(config, name, cancelled)
    try:
        return Pool(config, Ledger.create(config, ledger.mapping.region)), ledger
    except BaseException:
        ledger.close()
        raise


def recovered_pool(
    config: PoolConfig, ledger_fd: int, tenants: Mapping[int, str], first_number: int
) -> tuple[Pool, LedgerMemory]:
    """Rebuilds a pool from the ledger that an earlier process has kept; blocks for about 2 microseconds a block.

    `tenants` are those of the sessions that had it open; sequences and revisions count from `first_number`. Raises
    LedgerUnfit, or ArenaUnfit where it is too small, for one of another version of kvharbor.
    """
    ledger = LedgerMemory.kept(config, ledger_fd)
    try:
        opened = Ledger.open(config, ledger.mapping.region)
        pool = Pool.recovered(config, opened, tenants, first_number=first_number, first_revision=first_number)
    except BaseException:
        ledger.close()
        raise
    return pool, ledger
