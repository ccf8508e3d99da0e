"""One pool as the service has it: its memory, its owner, and who has opened it."""

from dataclasses import dataclass
from typing import Self

from kvharbor.gpumem import Descriptor
from kvharbor.pool import PinStats, Pool
from kvharbor.server.errors import ServerError
from kvharbor.server.memory.pool_memory import PoolMemory
from kvharbor.server.memory.status_page import StatusPage
from kvharbor.server.pools.recorder import Recorder
from kvharbor.server.pools.warm_desk import WarmDesk
from kvharbor.server.scheduling.admission import Admission
from kvharbor.server.scheduling.event_log import EventLog
from kvharbor.server.scheduling.owner import PoolOwner
from kvharbor.server.scheduling.recalls import Recalls
from kvharbor.server.scheduling.turns import Turns
from kvharbor.server.sessions.peer import Peer
from kvharbor.server.sessions.session import Session


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

    `grace_s`: how long after its last process's exit something may still touch the memory. Its sessions are guaranteed
    `guarantee_ratio` of its blocks, in equal shares. `may_have_left_versions`: an earlier process had it, and sessions
    may have gone since without saying at which version they were.
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
    page: StatusPage
    recalls: Recalls
    may_have_left_versions: bool = False

    @classmethod
    def of(
        cls,
        facts: PoolFacts,
        memory: PoolMemory,
        owner: PoolOwner,
        *,
        grace_s: float,
        page: StatusPage | None = None,
        guarantee_ratio: float = 0.0,
    ) -> Self:
        """Returns a pool that nobody has opened yet; its `page` is a new one unless an earlier process has kept it."""
        sessions = set[Session]()
        page = page or StatusPage.made(f"kvharbor-{facts.name}", facts.pool_id.partition(".")[0])
        guaranteed_count = int(owner.pool.config.block_count * guarantee_ratio)
        admission = Admission(owner, guarantee=lambda: guaranteed_count // max(len(sessions), 1))
        recalls = Recalls(owner, page, facts.pool_id, sessions, admission.waiting)
        admission.wanted = recalls.want

        def show() -> None:
            page.show(owner.pool, admission.waiting_count)

        admission.waiting_changed = show
        owner.listeners.append(show)
        show()
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
            admission=admission,
            sessions=sessions,
            warm=WarmDesk(owner, tenant=facts.tenant, pool_id=facts.pool_id, sessions=sessions),
            recorder=Recorder(owner, owner.events.limit_bytes),
            page=page,
            recalls=recalls,
        )

    @property
    def pool(self) -> Pool:
        """The pool itself, to read from."""
        return self.owner.pool

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, over all parts."""
        return self.descriptor.layout.block_bytes * len(self.places)

    def pins_for(self, peer: Peer, most: int) -> tuple[PinStats, ...]:
        """Returns the pins that the caller may see, the oldest first, at most so many."""
        return self.pool.pins(None if peer.administrator else peer.tenant, most)

    async def copy(self, pairs: tuple[tuple[int, int], ...]) -> None:
        """Copies whole blocks in every part, off the event loop; returns when all are complete."""
        await self.memory.copy(self.descriptor, pairs)

    def end_waits(self, reason: ServerError) -> None:
        """Ends watches, recordings and what waits with `reason`."""
        self.events.end_with(reason)
        self.recorder.end_with(reason)
        self.admission.give_up_all(reason)
        self.warm.end_waits(reason)

    async def close(self, reason: ServerError) -> None:
        """Ends what waits with `reason`, waits for what is under way and gives the memory back."""
        self.end_waits(reason)
        self.recalls.close()
        await self.owner.close()
        self.admission.close()
        await self.memory.close()
        self.page.close()

    @property
    def events(self) -> EventLog:
        """What happened to the index of late."""
        return self.owner.events


@dataclass(slots=True, eq=False)
class OpenedPool:
    """A pool as one session sees it: its calls' order, and how its sequences' handles begin.

    `resumed`: the session has told this process what it holds there, or it was opened with this process. `version` is
    that of the session's weights, for requests that name none.
    """

    served: ServedPool
    turns: Turns
    handle_prefix: str
    resumed: bool = True
    version: str = ""
