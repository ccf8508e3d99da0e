"""Watch: a snapshot of the index in pieces, then events as they come, each tenant its own."""

from collections.abc import AsyncIterator, Iterable, Iterator

from kvharbor.pool.errors import InvalidField
from kvharbor.pool.events import BlocksStored
from kvharbor.server.calls.gate import Callers, Context, Gate, streamed
from kvharbor.server.pools.pools import Pools
from kvharbor.server.pools.served_pool import ServedPool
from kvharbor.server.scheduling.event_log import stored_blocks
from kvharbor.server.session_errors import SessionUnknown
from kvharbor.server.sessions.session import Session
from kvharbor.v1 import cache_service_pb2 as pb
from kvharbor.v1 import cache_service_pb2_grpc as rpc

# About 90 KB a message, made in some milliseconds at most; others are served between two.
_PIECE_BLOCKS = 2048
_PIECE_BYTES = 256 * 1024


class WatchCall(rpc.CacheServiceServicer):
    """The call of CacheService that streams."""

    def __init__(self, gate: Gate, callers: Callers, pools: Pools, *, progress_s: float) -> None:
        self.gate = gate
        self._callers = callers
        self._pools = pools
        self._progress_s = progress_s

    @streamed
    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.WatchResponse]:
        peer = self._callers.peer(context)
        session = self._callers.session_or_none(context)
        served = self._pools.visible(peer, request.pool_id)
        if request.start_revision:
            position = _resumed(served, request.start_revision)
        else:
            # Begun in one step, so that the events from `position` on are those after the snapshot.
            position, revision = served.events.end, served.pool.revision
            chains = served.pool.index_chains(served.tenant, _PIECE_BLOCKS)
            for piece in _pieces(chains, revision):
                yield pb.WatchResponse(snapshot=piece)
        async for response in self._follow(served, position, session):
            yield response

    async def _follow(
        self, served: ServedPool, position: int, session: Session | None
    ) -> AsyncIterator[pb.WatchResponse]:
        events = served.events
        while True:
            batch = events.read(position, _PIECE_BYTES)
            position += len(batch)
            if batch:
                changes = [pb.WatchEvent.FromString(recorded.encoded) for recorded in batch]
                yield pb.WatchResponse(events=pb.WatchEvents(events=changes))
            elif events.ended_by is not None:
                raise events.ended_by
            elif session is not None and session.ended:
                raise SessionUnknown(session.cause)
            elif not await events.wait_beyond(position, self._progress_s):
                progress = pb.WatchProgress(revision=served.pool.revision)
                yield pb.WatchResponse(progress=progress)


def _resumed(served: ServedPool, start_revision: int) -> int:
    """Returns the position of the first event after a revision that the caller has seen."""
    revision = served.pool.revision
    if not 0 < start_revision <= revision:
        raise InvalidField(
            field="start_revision",
            value=start_revision,
            limit=f"0 to the present revision {revision}",
            remedy="resume from a revision of this pool, or watch from 0",
        )
    return served.events.position_after(start_revision)


def _pieces(chains: Iterable[BlocksStored], revision: int) -> Iterator[pb.WatchSnapshot]:
    """Gathers chains into messages; at least one, the last marked complete."""
    piece = pb.WatchSnapshot(revision=revision)
    block_count = 0
    for chain in chains:
        if block_count + len(chain.digests) > _PIECE_BLOCKS:
            yield piece
            piece, block_count = pb.WatchSnapshot(revision=revision), 0
        piece.stored.append(stored_blocks(chain))
        block_count += len(chain.digests)
    piece.complete = True
    yield piece
