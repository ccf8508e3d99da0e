"""One pool as the service has it: its memory, its owner, and who has opened it."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvharbor.gpumem import Descriptor, HostArena, Mapping, copy_blocks, require_room
from kvharbor.pool import Pool, PoolConfig
from kvharbor.server.admission import Admission
from kvharbor.server.errors import ServerError
from kvharbor.server.event_log import EventLog
from kvharbor.server.owner import PoolOwner
from kvharbor.server.sessions import Session
from kvharbor.server.turns import Turns
from kvharbor.server.warm_desk import WarmDesk

OWN_BYTES_A_BLOCK = 96
"""What an empty pool keeps a block in this process."""


@dataclass(slots=True, eq=False)
class ServedPool:
    """A pool with its memory and its owner. `sessions` has those that opened it."""

    pool_id: str
    tenant: str
    name: str
    size_bytes: int
    descriptor: Descriptor
    arena: HostArena
    mapping: Mapping
    owner: PoolOwner
    admission: Admission
    copier: ThreadPoolExecutor
    sessions: set[Session]
    warm: WarmDesk

    @property
    def pool(self) -> Pool:
        """The pool itself, to read from."""
        return self.owner.pool

    async def copy(self, pairs: tuple[tuple[int, int], ...]) -> None:
        """Copies whole blocks off the event loop, one copy of the pool after the other."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self.copier, copy_blocks, self.mapping, self.descriptor, pairs)

    async def close(self, reason: ServerError) -> None:
        """Ends watches with `reason`, waits for what is under way and gives the memory back."""
        self.events.end_with(reason)
        self.admission.give_up_all(reason)
        self.warm.end_waits(reason)
        await self.owner.close()
        # Off the loop: the kernel takes about 0.1 s for a GiB.
        await asyncio.to_thread(self._give_back)

    def _give_back(self) -> None:
        self.copier.shutdown(wait=True)
        self.mapping.close()
        self.arena.close()

    @property
    def events(self) -> EventLog:
        """What happened to the index of late."""
        return self.owner.events


@dataclass(frozen=True, slots=True, eq=False)
class OpenedPool:
    """A pool as one session sees it: its calls' order, and how its sequences' handles begin."""

    served: ServedPool
    turns: Turns
    handle_prefix: str


def pool_with_memory(
    config: PoolConfig, descriptor: Descriptor, name: str, cancelled: Callable[[], bool]
) -> tuple[Pool, HostArena, Mapping]:
    """Makes a pool and reserves its memory; blocks for as long as the kernel takes to zero it."""
    # Little beside real blocks; beside blocks of a few bytes it is what runs the host out of memory.
    require_room(descriptor.block_count * OWN_BYTES_A_BLOCK)
    pool = Pool(config)
    arena = HostArena.create(descriptor.size_bytes, name=name)
    try:
        arena.reserve(cancelled=cancelled)
        return pool, arena, arena.map()
    except BaseException:
        arena.close()
        raise
