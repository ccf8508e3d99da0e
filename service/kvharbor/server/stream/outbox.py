"""What a stream has still to send: in order, bounded, and each taken back that has not left."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

from kvharbor.server.errors import WatcherTooSlow
from kvharbor.v1 import blocks_pb2
from kvharbor.v1 import stream_service_pb2 as pb

MAX_UNSENT: Final = 1024
"""Responses that may wait to be sent, beside what the transport has taken. A client that reads has a handful."""
MAX_UNSENT_BYTES: Final = 32 * 2**20
"""Their bytes: twice what one may have by default."""


class Outbox:
    """Responses in the order in which they are put. Who does not read them is cut off [S9]."""

    def __init__(self) -> None:
        self._unsent: deque[tuple[pb.ConverseResponse, int, Callable[[], None] | None]] = deque()
        self._unsent_bytes = 0
        self._recalls: dict[str, blocks_pb2.Recall] = {}
        self._more: asyncio.Future[None] | None = None
        self._is_closed = False

    def put(self, response: pb.ConverseResponse, undo: Callable[[], None] | None = None) -> None:
        """Adds a response; `undo` takes back what it tells, if it does not leave. Raises WatcherTooSlow."""
        if len(self._unsent) >= MAX_UNSENT or self._unsent_bytes >= MAX_UNSENT_BYTES:
            if undo is not None:
                undo()
            raise WatcherTooSlow(
                len(self._unsent),
                limit=f"{MAX_UNSENT} or {MAX_UNSENT_BYTES} bytes",
                what="responses",
                remedy="read the stream while you write to it, and open it again",
            )
        size_bytes = response.ByteSize()
        self._unsent.append((response, size_bytes, undo))
        self._unsent_bytes += size_bytes
        self._wake()

    def put_recall(self, pool_id: str, block_count: int) -> None:
        """Adds a notice; one that has not left yet is made the new one."""
        recall = self._recalls.get(pool_id)
        if recall is None:
            response = pb.ConverseResponse(recall=blocks_pb2.Recall(pool_id=pool_id, block_count=block_count))
            self._recalls[pool_id] = response.recall
            # Whatever waits to be sent: there is one a pool, and it is short.
            self._unsent.append((response, 0, None))
            self._wake()
        else:
            recall.block_count = block_count

    def close(self) -> None:
        """Nothing more will come: `send_all` returns when everything has left."""
        self._is_closed = True
        self._wake()

    async def send_all(self, write: Callable[[pb.ConverseResponse], Awaitable[None]]) -> None:
        """Writes what comes, one after the other, until it is closed. What is being written counts as having left."""
        while True:
            while self._unsent:
                response, size_bytes, _ = self._unsent.popleft()
                self._unsent_bytes -= size_bytes
                if not response.number:
                    del self._recalls[response.recall.pool_id]
                await write(response)
            if self._is_closed:
                return
            self._more = asyncio.get_running_loop().create_future()
            await self._more

    def undo_all(self) -> None:
        """Takes back what has not left, the last first."""
        while self._unsent:
            _, _, undo = self._unsent.pop()
            if undo is not None:
                undo()

    def _wake(self) -> None:
        if self._more is not None and not self._more.done():
            self._more.set_result(None)
