"""One ordered queue for the calls of one session on one pool [S3]."""

import asyncio
from collections import deque


class Turns:
    """A turn is had by one at a time, first come first served, and handed straight to the next in line.

    Unlike asyncio.Lock, a newcomer finds out without awaiting whether it is its turn: the ordinary call
    runs to its end without once giving up control.
    """

    __slots__ = ("_over", "_taken", "_waiting")

    def __init__(self) -> None:
        self._over: Exception | None = None
        self._taken = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    def try_take(self) -> bool:
        """Takes the turn if nobody has it or waits for it. Raises what the turns have ended with."""
        if self._over is not None:
            raise self._over
        if self._taken:
            return False
        self._taken = True
        return True

    async def take(self) -> None:
        """Waits for the turn and takes it. Cancelled, it leaves the queue. Raises what the turns have ended with."""
        if self.try_take():
            return
        handed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(handed)
        try:
            await handed
        except asyncio.CancelledError:
            if handed.done() and not handed.cancelled():
                self.leave()
            raise

    def end(self, reason: Exception) -> None:
        """Gives no turn any more: who waits for one, and who comes later, gets `reason` instead."""
        self._over = reason
        while self._waiting:
            handed = self._waiting.popleft()
            if not handed.done():
                handed.set_exception(reason)

    def leave(self) -> None:
        """Ends the turn of whoever has it."""
        while self._waiting:
            handed = self._waiting.popleft()
            if not handed.done():
                handed.set_result(None)
                return
        self._taken = False
