"""Ends what a call has made that was given up, where nobody could name it any more [S22]."""

import asyncio
from types import TracebackType
from typing import Self

from kvharbor.pool import Awaited, BlockRun
from kvharbor.pool.steps import Steps
from kvharbor.server.pools.served_pool import OpenedPool
from kvharbor.server.sessions.session import Session


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
        self._awaited: Awaited | None = None
        self._is_over = False

    def note(self, *numbers: int) -> None:
        """The call has made these sequences."""
        self._made += numbers

    def note_wait(self, awaited: Awaited) -> None:
        """The call waits for what another session computes: it does so no more when it is over, however that ends."""
        if self._is_over:  # before this operation of it
            self._opened.served.pool.stop_waiting(awaited)
        else:
            self._awaited = awaited

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over = True
        if (awaited := self._awaited) is not None:
            owner = self._opened.served.owner
            owner.call(lambda: owner.pool.stop_waiting(awaited))
        if exc_type is asyncio.CancelledError:
            self.withdraw()

    def withdraw(self) -> None:
        """Ends them, unless they have a name."""
        if not self._is_named:
            owner = self._opened.served.owner
            owner.spawn(owner.run(self._opened.turns, self._release))

    def _release(self) -> Steps[None]:
        for number in self._made:
            # What an ended session has ends with it.
            if not self._session.ended:
                yield from self._opened.served.pool.release(self._session.number, number)


class BlockWithdrawal:
    """Surrounds a call that takes blocks. Cancelled in it, they are given back in the session's next turn."""

    def __init__(self, session: Session, opened: OpenedPool) -> None:
        self._session = session
        self._opened = opened
        self._taken: list[BlockRun] = []

    def note(self, *taken: BlockRun) -> None:
        """The call has taken these, which the session had not held."""
        self._taken += taken

    def withdraw(self) -> None:
        """Gives all of them back, the last first."""
        owner = self._opened.served.owner
        owner.spawn(owner.run(self._opened.turns, self._release))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc_type is asyncio.CancelledError:
            self.withdraw()

    def _release(self) -> Steps[None]:
        for taken in reversed(self._taken):
            self._opened.served.recorder.released(self._session.number, taken, are_told=False)
            if len(taken) and not self._session.ended:
                yield from self._opened.served.pool.release_blocks(self._session.number, taken)
