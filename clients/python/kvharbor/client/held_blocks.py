"""What a session holds by itself in one pool, and how that ends: releases, refusals, and blocks that were lost."""

import logging
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from kvharbor.client import refusals
from kvharbor.client.errors import BlockNotHeld, EpochEnded, HarborError, SessionGone
from kvharbor.client.outbox import Outgoing
from kvharbor.client.runs import BlockRun, OwnBlocks, run_of, table_of
from kvharbor.v1 import blocks_pb2
from kvharbor.v1 import stream_service_pb2 as stream_pb2

if TYPE_CHECKING:
    from kvharbor.client.pool import Pool
    from kvharbor.client.stream import Stream

_LOG = logging.getLogger(__name__)
_NAMED_COUNT = 10


class Stock(Protocol):
    """Leased blocks that are not in use."""

    def give_back(self, block_count: int) -> int:
        """Releases up to so many; returns how many. Not under the guard."""

    def lose(self, lost: BlockRun) -> None:
        """Takes in, under the guard, that the session does not hold these any more."""


class HeldBlocks:
    """The set of a session's own blocks, and the requests that change it. Its methods are called under the guard."""

    def __init__(self, pool: "Pool") -> None:
        self._pool = pool
        self.own = OwnBlocks(pool.memory.descriptor.block_count)
        self.stocks: weakref.WeakSet[Any] = weakref.WeakSet()
        self.refused: list[HarborError] = []
        self.on_refusal: Callable[[HarborError], object] | None = None

    @property
    def stream(self) -> "Stream":
        """What requests are sent on."""
        return self._pool.link.stream

    def release(self, blocks: BlockRun) -> None:
        """Releases blocks that nothing is written to any more."""
        if len(blocks):
            outgoing = self._releasing(blocks)
            self.stream.put(outgoing)
            self.own.releasing(blocks, outgoing.number)

    def release_fresh(self, runs: Iterable[BlockRun]) -> None:
        """Releases what nobody wants of what was granted, without ending what was held before."""
        for run in runs:
            self.release(self.own.add(run))

    def growing(
        self, want: int, take: Callable[[BlockRun], object], fail: Callable[[HarborError], object], *, least: int = 0
    ) -> Outgoing:
        """Returns the request that leases blocks for growth; `take` is given them."""
        message = blocks_pb2.LeaseRequest(
            pool_id=self._pool.id, least_block_count=least, want_block_count=want, growth=True
        )

        def taken(response: stream_pb2.ConverseResponse) -> None:
            if response.WhichOneof("result") == "refusal":
                fail(refusals.from_item(response.refusal))
                return
            leased = run_of(response.lease.leased)
            self.own.add(leased)
            take(leased)

        return Outgoing(lambda _: stream_pb2.ConverseRequest(lease=message), taken, fail)

    def lost(self, blocks: BlockRun, cause: HarborError | None) -> None:
        """Takes in that the session does not hold blocks any more [C17].

        `cause` None: the service's ledger has it so, which is an error but for what is being released.
        """
        self.own.discard(blocks)
        for stock in [*self.stocks]:
            stock.lose(blocks)
        if cause is None and len(unexpected := blocks[~blocks.among(self.stream.unanswered.releases())]):
            named = ", ".join(f"{block}/{generation}" for block, generation in unexpected[:_NAMED_COUNT])
            self.refuse(
                BlockNotHeld(
                    f"the service's new process has {len(unexpected)} blocks not as this session's any more "
                    f"(block/generation): {named}",
                    metadata={"blockCount": str(len(unexpected)), "blocks": named},
                )
            )

    def refuse_if_refused(self, response: stream_pb2.ConverseResponse) -> None:
        """Takes in the refusal of a whole request that nobody waits for, if it is one."""
        if response.WhichOneof("result") == "refusal":
            self.refuse(refusals.from_item(response.refusal))

    def refuse(self, error: HarborError) -> None:
        """Takes in what a request that nobody waits for was refused with; that all has ended is no refusal."""
        error = self._pool.link.standing.meant(error)
        if isinstance(error, EpochEnded | SessionGone):
            return
        if self.on_refusal is not None:
            on_refusal = self.on_refusal
            self.stream.later(lambda: on_refusal(error))
            return
        _LOG.error("refused: %s", error)
        self.refused.append(error)

    def _releasing(self, blocks: BlockRun) -> Outgoing:
        pool_id = self._pool.id

        def make(outgoing: Outgoing) -> stream_pb2.ConverseRequest:
            message = blocks_pb2.ReleaseBlocksRequest(pool_id=pool_id, blocks=table_of(outgoing.releases))
            return stream_pb2.ConverseRequest(release_blocks=message)

        def take(response: stream_pb2.ConverseResponse) -> None:
            self.refuse_if_refused(response)
            self.own.discard(outgoing.releases)

        outgoing = Outgoing(make, take, self.refuse, repeatable=True, releases=blocks)
        return outgoing
