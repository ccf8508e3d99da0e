"""What happened to a pool's index of late, for watchers that follow, fall behind or come back."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvharbor.pool.events import BlocksRemoved, BlocksStored, Event, PinEnded
from kvharbor.server.errors import RevisionCompacted, ServerError, WatcherTooSlow
from kvharbor.server.messages.wire import little_endian
from kvharbor.server.sizes import format_size
from kvharbor.v1 import cache_service_pb2 as pb


@dataclass(frozen=True, slots=True)
class Recorded:
    """One event as it goes over the wire: bytes, as a million message objects would cost ten times as much."""

    revision: int
    tenant: str
    encoded: bytes


class EventLog:
    """Keeps the last events within `limit_bytes`. Watchers read by position and are never buffered for [S9].

    Positions count events since the pool was made. `compact_revision` is that of the newest event that is
    gone: a watch can resume after it, or after any later one.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._kept: deque[Recorded] = deque()
        self._kept_bytes = 0
        self._first = 0
        self._changed: asyncio.Future[None] | None = None
        self.compact_revision = 0
        self.ended_by: ServerError | None = None

    @property
    def end(self) -> int:
        """The position behind the newest event."""
        return self._first + len(self._kept)

    def append(self, events: Sequence[Event]) -> None:
        """Adds events in order, lets the oldest go, and wakes the watchers."""
        for event in events:
            recorded = Recorded(event.revision, event.tenant, _encoded(event))
            self._kept.append(recorded)
            self._kept_bytes += len(recorded.encoded)
        while self._kept_bytes > self.limit_bytes and len(self._kept) > 1:
            gone = self._kept.popleft()
            self._first += 1
            self._kept_bytes -= len(gone.encoded)
            self.compact_revision = gone.revision
        self._wake()

    def end_with(self, reason: ServerError) -> None:
        """Ends every watch with `reason`, those to come too."""
        self.ended_by = reason
        self._wake()

    def position_after(self, revision: int) -> int:
        """Returns the position of the first event after `revision`, or raises RevisionCompacted."""
        if revision < self.compact_revision:
            raise RevisionCompacted(revision, compact_revision=self.compact_revision)
        behind = 0
        for recorded in reversed(self._kept):
            if recorded.revision <= revision:
                break
            behind += 1
        return self.end - behind

    def read(self, position: int, most_bytes: int) -> list[Recorded]:
        """Returns events from `position` on, until they exceed `most_bytes`.

        Raises WatcherTooSlow when the first is gone.
        """
        if position < self._first:
            raise WatcherTooSlow(self.end - position, limit=format_size(self.limit_bytes))
        found: list[Recorded] = []
        size_bytes = 0
        # By index: a deque finds those near its ends at once, and that is where a watcher is who keeps up.
        for index in range(position - self._first, len(self._kept)):
            recorded = self._kept[index]
            found.append(recorded)
            size_bytes += len(recorded.encoded)
            if size_bytes > most_bytes:
                break
        return found

    async def wait_beyond(self, position: int, timeout_s: float) -> bool:
        """Waits for an event at `position` or the log's end; False when neither came in time."""
        if self.end > position or self.ended_by is not None:
            return True
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.wait([self._changed], timeout=timeout_s)
        return self.end > position or self.ended_by is not None

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set_result(None)
            self._changed = None


def stored_blocks(event: BlocksStored) -> pb.StoredBlocks:
    """Returns a chain as a message."""
    message = pb.StoredBlocks(parent_digest=event.parent_digest, digests=b"".join(event.digests))
    message.blocks.block_ids = little_endian("I", event.block_ids)
    message.blocks.generations = little_endian("Q", event.generations)
    return message


def _encoded(event: Event) -> bytes:
    message = pb.WatchEvent(revision=event.revision)
    if isinstance(event, BlocksStored):
        message.stored.CopyFrom(stored_blocks(event))
    elif isinstance(event, BlocksRemoved):
        message.removed.digests = b"".join(event.digests)
    elif isinstance(event, PinEnded):
        message.pin_ended.name = event.name
        message.pin_ended.expired = event.expired
    return message.SerializeToString()
