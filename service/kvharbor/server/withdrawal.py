"""Ends the sequences of a call that was given up, where nobody could name them any more."""

import asyncio
from types import TracebackType
from typing import Self

from kvharbor.pool.steps import Steps
from kvharbor.server.served_pool import OpenedPool
from kvharbor.server.session import Session


class Withdrawal:
    """Surrounds a call that makes sequences. Cancelled in it, those that it made end, unless a request_id names them.

    They end in the session's next turn, so after the operation, which itself ends whatever becomes of its call [S2].
    Nothing can be done for an answer that has left: a caller that needs to know gives a request_id [S22].
    """

    def __init__(self, session: Session, opened: OpenedPool, request_id: str) -> None:
        self._session = session
        self._opened = opened
        self._is_named = bool(request_id)
        self._made: list[int] = []

    def note(self, *numbers: int) -> None:
        """The call has made these sequences."""
        self._made += numbers

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc_type is asyncio.CancelledError and not self._is_named:
            owner = self._opened.served.owner
            owner.spawn(owner.run(self._opened.turns, self._release))

    def _release(self) -> Steps[None]:
        for number in self._made:
            yield from self._opened.served.pool.release(self._session.number, number)
