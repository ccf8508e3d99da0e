"""One engine with its processes."""

import asyncio
import enum
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kvharbor.pool.engines import UNNAMED, Engine
from kvharbor.server.sessions.members import Member, Mode
from kvharbor.server.sessions.peer import Peer
from kvharbor.server.sessions.warm_notices import WarmNotices

if TYPE_CHECKING:
    from kvharbor.server.pools.served_pool import OpenedPool


class State(enum.Enum):
    """How a session stands: it may call; it has still to resume; it has ended, its processes perhaps not."""

    LIVE = "live"
    RESUMING = "resuming"
    ENDING = "ending"


class Stream(Protocol):
    """The stream of a session, as others see it."""

    def recall(self, pool_id: str, block_count: int) -> None:
        """Asks for leased blocks of a pool."""

    def end(self, reason: BaseException) -> None:
        """Ends it at once."""


@dataclass(slots=True, eq=False)
class Session:
    """One engine. Tokens are secret; `opened` has its pools by pool_id; `warm_notices` if it accepts warm tasks.

    `peer` is its leader. Once `ended`, for `cause`, no call may begin in its name; those under way finish first.
    `closed`: its client has asserted that no process of it touches a block any more. `kept_pool_ids` are the pools
    that it had open with the process before this one. `began_at` is monotonic. `stream` is the one it has now.
    """

    number: int
    token: str
    peer: Peer
    client_name: str
    client_version: str
    warm_notices: WarmNotices | None = None
    join_token: str = ""
    state: State = State.LIVE
    began_at: float = field(default_factory=time.monotonic)
    members: list[Member] = field(default_factory=list)
    opened: "dict[str, OpenedPool]" = field(default_factory=dict)
    kept_pool_ids: frozenset[str] = frozenset()
    cause: str = ""
    closed: bool = False
    ending: "asyncio.Task[int] | None" = None
    stream: Stream | None = None
    engine: Engine = UNNAMED

    @property
    def ended(self) -> bool:
        """Whether no call may begin in its name."""
        return self.state is State.ENDING

    def recall(self, pool_id: str, block_count: int) -> None:
        """Asks it for leased blocks of a pool, if it has a stream."""
        if self.stream is not None:
            self.stream.recall(pool_id, block_count)

    @property
    def writers(self) -> list[Member]:
        """The members that may write."""
        return [member for member in self.members if member.mode is Mode.READ_WRITE]
