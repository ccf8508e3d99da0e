"""One pool as the service has it: its memory, its owner, and who has opened it."""

from dataclasses import dataclass
from typing import Self

from kvharbor.gpumem import Descriptor
from kvharbor.pool import Pool
from kvharbor.server.admission import Admission
from kvharbor.server.errors import ServerError
from kvharbor.server.event_log import EventLog
from kvharbor.server.owner import PoolOwner
from kvharbor.server.pool_memory import PoolMemory
from kvharbor.server.recorder import Recorder
from kvharbor.server.session import Session
from kvharbor.server.turns import Turns
from kvharbor.server.warm_desk import WarmDesk


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """What a pool was made with; `size_bytes` is what was asked for, of each part. `places` are those of the parts."""

    pool_id: str
    tenant: str
    name: str
    size_bytes: int
    descriptor: Descriptor
    places: tuple[str, ...]


@dataclass(slots=True, eq=False)
class ServedPool:
    """A pool with its memory and its owner, made by `of`. `sessions` has those that opened it.

    `grace_s`: how long after its last process's exit something may still touch the memory.
    """

    pool_id: str
    tenant: str
    name: str
    size_bytes: int
    descriptor: Descriptor
    places: tuple[str, ...]
    memory: PoolMemory
    grace_s: float
    owner: PoolOwner
    admission: Admission
    sessions: set[Session]
    warm: WarmDesk
    recorder: Recorder

    @classmethod
    def of(cls, facts: PoolFacts, memory: PoolMemory, owner: PoolOwner, *, grace_s: float) -> Self:
        """Returns a pool that nobody has opened yet."""
        sessions = set[Session]()
        return cls(
            pool_id=facts.pool_id,
            tenant=facts.tenant,
            name=facts.name,
            size_bytes=facts.size_bytes,
            descriptor=facts.descriptor,
            places=facts.places,
            memory=memory,
            grace_s=grace_s,
            owner=owner,
            admission=Admission(owner),
            sessions=sessions,
            warm=WarmDesk(owner, tenant=facts.tenant, pool_id=facts.pool_id, sessions=sessions),
            recorder=Recorder(owner, owner.events.limit_bytes),
        )

    @property
    def pool(self) -> Pool:
        """The pool itself, to read from."""
        return self.owner.pool

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, over all parts."""
        return self.descriptor.layout.block_bytes * len(self.places)

    async def copy(self, pairs: tuple[tuple[int, int], ...]) -> None:
        """Copies whole blocks in every part, off the event loop; returns when all are complete."""
        await self.memory.copy(self.descriptor, pairs)

    async def close(self, reason: ServerError) -> None:
        """Ends watches with `reason`, waits for what is under way and gives the memory back."""
        self.events.end_with(reason)
        self.recorder.end_with(reason)
        self.admission.give_up_all(reason)
        self.warm.end_waits(reason)
        await self.owner.close()
        await self.memory.close()

    @property
    def events(self) -> EventLog:
        """What happened to the index of late."""
        return self.owner.events


@dataclass(slots=True, eq=False)
class OpenedPool:
    """A pool as one session sees it: its calls' order, and how its sequences' handles begin.

    `resumed`: the session has told this process what it holds there, or it was opened with this process.
    """

    served: ServedPool
    turns: Turns
    handle_prefix: str
    resumed: bool = True
