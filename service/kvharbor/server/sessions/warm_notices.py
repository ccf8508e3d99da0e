"""What a session is told of warm tasks: at most one notice a pool that it has not answered by a claim."""

import asyncio


class WarmNotices:
    """The notices of one session: `tell` from anywhere on the loop, `next` for the side socket that sends them.

    A session that never reads has one notice a pool in its socket, and no more are kept for it.
    """

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._unsent: asyncio.Queue[str] = asyncio.Queue()

    def tell(self, pool_id: str) -> None:
        """Queues a notice for the pool, unless one is unanswered."""
        if pool_id not in self._told:
            self._told.add(pool_id)
            self._unsent.put_nowait(pool_id)

    def answered(self, pool_id: str) -> None:
        """The session asks for a task of the pool: from now on it may be told again."""
        self._told.discard(pool_id)

    async def next(self) -> str:
        """Waits for the next notice to send and returns its pool."""
        return await self._unsent.get()
