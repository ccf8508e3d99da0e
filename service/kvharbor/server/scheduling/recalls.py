"""Recalls: sessions with leased blocks are asked for those that they do not use when another one lacks room."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from kvharbor.server.memory.status_page import StatusPage
from kvharbor.server.scheduling.applications import Applicant
from kvharbor.server.scheduling.owner import PoolOwner

PAUSE_S: Final = 0.05
"""Between two recalls of a pool, however often somebody is refused there, and while somebody waits."""


class Holder(Applicant, Protocol):
    """Who may hold leased blocks: a session."""

    def recall(self, pool_id: str, block_count: int) -> None:
        """Asks it for leased blocks of a pool, if it listens."""


class Recalls:
    """Asks for leased blocks of one pool back [S34]: again and again while somebody waits, once if he does not.

    `waiting` yields who waits, and how many blocks each lacks.
    """

    def __init__(
        self,
        owner: PoolOwner,
        page: StatusPage,
        pool_id: str,
        sessions: Iterable[Holder],
        waiting: Callable[[], Iterable[tuple[Applicant, int]]],
    ) -> None:
        self._owner = owner
        self._page = page
        self._pool_id = pool_id
        self._sessions = sessions
        self._waiting = waiting
        self._refused: dict[Applicant, int] = {}
        self._pause: asyncio.TimerHandle | None = None

    def want(self, applicant: Applicant, block_count: int) -> None:
        """Somebody lacks so many blocks. In the pause after a recall he comes with the next one."""
        self._refused[applicant] = block_count
        if self._pause is None:
            self._recall()

    def close(self) -> None:
        """Asks nobody any more."""
        if self._pause is not None:
            self._pause.cancel()
        self._sessions = ()

    def _recall(self) -> None:
        self._pause = None
        wanted: dict[Applicant, int] = {}
        for applicant, block_count in self._waiting():
            wanted[applicant] = wanted.get(applicant, 0) + block_count
        wanted = {**self._refused, **wanted}
        self._refused.clear()
        if not wanted:
            return
        self._pause = asyncio.get_running_loop().call_later(PAUSE_S, self._recall)
        asked = [session for session in self._sessions if self._ask(session, wanted)]
        if asked:
            self._page.recall()

    def _ask(self, session: Holder, wanted: dict[Applicant, int]) -> bool:
        """Asks one for what others lack; returns whether there was anything to ask for."""
        missing = sum(wanted.values()) - wanted.get(session, 0)
        if not missing or session.ended or not self._owner.pool.leased_block_count(session.number):
            return False
        session.recall(self._pool_id, missing)
        return True
