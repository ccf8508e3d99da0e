"""Who is connected: a session is one side socket, and ends with it."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from kvharbor.server.errors import SessionUnknown
from kvharbor.server.warm_notices import WarmNotices

if TYPE_CHECKING:
    from kvharbor.server.served_pool import OpenedPool

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Peer:
    """A process as the kernel vouches for it, with what the settings make of its user [S6]."""

    pid: int
    uid: int | None
    tenant: str
    administrator: bool


@dataclass(slots=True, eq=False)
class Session:
    """One engine. `token` is secret; `opened` has its pools by pool_id; `warm_notices` if it accepts warm tasks.

    Once `ended`, no call may begin in its name; those under way finish first.
    """

    number: int
    token: str
    peer: Peer
    client_name: str
    client_version: str
    warm_notices: WarmNotices | None = None
    opened: "dict[str, OpenedPool]" = field(default_factory=dict)
    ended: bool = False
    close_side_socket: Callable[[], None] | None = None
    ending: "asyncio.Task[int] | None" = None


class Sessions:
    """All live sessions. `end_in_pool` takes one out of a pool and returns how many sequences that released."""

    def __init__(self, end_in_pool: "Callable[[Session, OpenedPool], Awaitable[int]]") -> None:
        self._end_in_pool = end_in_pool
        self._by_token: dict[str, Session] = {}
        self._ending: set[asyncio.Task[int]] = set()
        self._next_number = 1

    def __len__(self) -> int:
        return len(self._by_token)

    def begin(
        self, peer: Peer, *, client_name: str, client_version: str, warm_notices: WarmNotices | None = None
    ) -> Session:
        """Makes a session for a process that has said hello."""
        session = Session(self._next_number, secrets.token_urlsafe(24), peer, client_name, client_version, warm_notices)
        self._next_number += 1
        self._by_token[session.token] = session
        log.info(
            "session began",
            session=session.number,
            tenant=peer.tenant,
            pid=peer.pid,
            client=client_name,
            version=client_version,
        )
        return session

    def of(self, token: str) -> Session:
        """Returns the live session of a token, or raises SessionUnknown."""
        session = self._by_token.get(token)
        if session is None:
            raise SessionUnknown
        return session

    async def end(self, session: Session, *, cause: str) -> int:
        """Ends a session in all its pools; returns the sequences released. Repeated calls share one result."""
        if session.ending is None:
            session.ended = True
            del self._by_token[session.token]
            session.ending = asyncio.create_task(self._end(session, cause))
            self._ending.add(session.ending)
            session.ending.add_done_callback(self._ending.discard)
        return await asyncio.shield(session.ending)

    async def end_all(self) -> None:
        """Ends every session; for shutdown."""
        await asyncio.gather(*(self.end(session, cause="shutdown") for session in [*self._by_token.values()]))
        if self._ending:
            await asyncio.wait(self._ending)

    async def _end(self, session: Session, cause: str) -> int:
        released_count = 0
        for opened in [*session.opened.values()]:
            released_count += await self._end_in_pool(session, opened)
        session.opened.clear()
        if session.close_side_socket is not None:
            session.close_side_socket()
        log.info("session ended", session=session.number, cause=cause, released_sequence_count=released_count)
        return released_count
