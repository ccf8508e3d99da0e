"""One pool as the service has it: its memory, its owner, and who has opened it."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvharbor.gpumem import Descriptor, HostArena, Mapping, copy_blocks
from kvharbor.pool import Pool
from kvharbor.server.admission import Admission
from kvharbor.server.errors import ServerError
from kvharbor.server.event_log import EventLog
from kvharbor.server.owner import PoolOwner
from kvharbor.server.sessions import Session
from kvharbor.server.turns import Turns


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
        await self.owner.close()
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


def reserved_memory(descriptor: Descriptor, name: str, cancelled: Callable[[], bool]) -> tuple[HostArena, Mapping]:
    """Makes and reserves the memory; blocks for as long as the kernel takes to zero it."""
    arena = HostArena.create(descriptor.size_bytes, name=name)
    try:
        arena.reserve(cancelled=cancelled)
        return arena, arena.map()
    except BaseException:
        arena.close()
        raise
