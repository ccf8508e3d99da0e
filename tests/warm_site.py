"""The desk of one pool in the test's own process, with operators and engines that meet there."""

import asyncio
import struct
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from kvharbor.pool import Commit, Pool, PoolConfig, Prompt
from kvharbor.server.errors import Draining
from kvharbor.server.pools.warm_desk import Claimed, PinRequest, WarmDesk
from kvharbor.server.scheduling.event_log import EventLog
from kvharbor.server.scheduling.owner import PoolOwner, offset_clock
from kvharbor.server.scheduling.turns import Turns
from kvharbor.server.sessions.peer import Peer
from kvharbor.server.sessions.session import Session
from kvharbor.server.sessions.warm_notices import WarmNotices

Scenario = Callable[["Site"], Coroutine[Any, Any, None]]


def crash(failure: BaseException) -> NoReturn:
    """Stands for the end of the process."""
    raise AssertionError("the process would end") from failure


def asked(*ids: int, name: str = "w", expires_at: float | None = None) -> PinRequest:
    """Returns what asks to pin these tokens."""
    return PinRequest(Prompt(struct.pack(f"<{len(ids)}I", *ids)), name, expires_at)


class Site:
    """A desk over a pool of 8 blocks of 2 tokens, and engines that accept tasks."""

    def __init__(self) -> None:
        self.pool = Pool(PoolConfig(8, 2, slice_blocks=1, warm_budget_ratio=0.5))
        self.owner = PoolOwner(self.pool, EventLog(1 << 20), offset_clock(1e6), crash)
        self.sessions: set[Session] = set()
        self.turns: dict[int, Turns] = {}
        self.desk = WarmDesk(self.owner, tenant="t", pool_id="p", sessions=self.sessions)

    def engine(self) -> Session:
        """Returns an engine that has the pool open."""
        number = len(self.turns) + 1
        session = Session(number, "secret", Peer(0, 0, "t", False), "", "", WarmNotices())
        self.pool.open_session(number, "t")
        self.turns[number] = Turns()
        self.sessions.add(session)
        return session

    async def claim(self, session: Session, request_id: str = "c") -> Claimed:
        return await self.desk.claim(session, self.turns[session.number], request_id)

    async def commit(self, session: Session, claimed: Claimed, token_count: int) -> None:
        sequence = claimed.sequence.number
        await self.owner.run(
            self.turns[session.number], lambda: self.pool.commit(session.number, sequence, Commit(token_count))
        )

    async def release(self, session: Session, claimed: Claimed) -> None:
        await self.owner.run(
            self.turns[session.number], lambda: self.pool.release(session.number, claimed.sequence.number)
        )

    async def lose(self, session: Session) -> None:
        """The engine dies and is proved gone."""
        turns = self.turns[session.number]
        await self.owner.run(turns, lambda: self.pool.end_session(session.number))
        await self.owner.run(turns, lambda: self.pool.session_quiet(session.number))
        self.sessions.discard(session)


def on_site(scenario: Scenario) -> None:
    """Runs a scenario, and looks at what it leaves."""

    async def main() -> None:
        site = Site()
        await scenario(site)
        site.pool.check_invariants()
        site.desk.end_waits(Draining())
        await site.owner.close()

    asyncio.run(main())


async def told(session: Session) -> bool:
    """Whether there is a notice to send; takes it."""
    assert session.warm_notices is not None
    try:
        async with asyncio.timeout(0):
            return await session.warm_notices.next() == "p"
    except TimeoutError:
        return False
