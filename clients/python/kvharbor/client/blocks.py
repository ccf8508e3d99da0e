"""Block calls of the synchronous client, for engines that keep their block tables themselves [C17]."""

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from kvharbor.client import channel, refusals
from kvharbor.client.calls import duration, request
from kvharbor.client.chains import Chain, CommitChain
from kvharbor.client.errors import HarborError, MessageTooLarge
from kvharbor.client.grants import Acquired, Invalidated, Leased, acquired
from kvharbor.client.held_blocks import HeldBlocks
from kvharbor.client.outbox import Outgoing
from kvharbor.client.runs import NO_BLOCKS, BlockRun, run_of, table_of
from kvharbor.client.status_page import StatusPage
from kvharbor.client.unanswered import Answer
from kvharbor.client.waits import Answers, granted_runs
from kvharbor.v1 import blocks_pb2, types_pb2
from kvharbor.v1 import stream_service_pb2 as stream_pb2

if TYPE_CHECKING:
    from kvharbor.client.pool import Pool

_LOG = logging.getLogger(__name__)


class BlockCalls:
    """Blocks that the session holds by itself in one pool. Threads may share it.

    Holding is membership in a set: to hold twice is to hold once, and one release ends it. Calls take effect in the
    order in which they are made. `commit`, `release` and `abandon` return at once, `flush` waits until they have taken
    effect. What they are refused with goes to `on_refusal`, in the stream's thread; without it, it is logged, and the
    next `flush` raises it.

    `on_recall` is asked for blocks when others need room, about how many would do, in the stream's thread: it returns
    leased blocks that nothing is written to, and waits for no call. They are released at once.

    `computing`: whether a step of the engine is under way, for others who wait for what that computes [C21].
    """

    def __init__(self, pool: "Pool") -> None:
        self._pool = pool
        self._page: StatusPage | None = None
        self.held = HeldBlocks(pool)
        self.on_recall: Callable[[int], BlockRun] | None = None
        self.computing = pool.link.stream.signs.step(weakref.WeakMethod(self._tell_computing))
        pool.link.stream.on_recall(pool.id, self._recalled)

    @property
    def on_refusal(self) -> Callable[[HarborError], object] | None:
        """What is called with the refusal of a call that nobody waits for; None: it is logged and kept for `flush`."""
        return self.held.on_refusal

    @on_refusal.setter
    def on_refusal(self, on_refusal: Callable[[HarborError], object] | None) -> None:
        self.held.on_refusal = on_refusal

    def acquire(
        self, chains: Sequence[Chain], *, wait_s: float = 0.0, timeout_s: float | None = None
    ) -> list[Acquired]:
        """Holds what is there of prompts, and leases the rest of each, all or nothing a chain; one round trip.

        In order of admission: after a chain that does not fit no other is tried. With `wait_s` that one waits for room,
        for so long, and its `grant` tells what comes. Raises Unavailable where no answer comes: nothing is held then,
        and what an answer gives that comes too late is given back.
        """
        message = request(blocks_pb2.AcquireRequest, chains=[each.message(self.version) for each in chains])
        if wait_s:
            message.wait.CopyFrom(duration("wait_s", wait_s))
        call = _sendable(stream_pb2.ConverseRequest(acquire=message))

        def make(answer: Answer) -> Outgoing:
            def take(response: stream_pb2.ConverseResponse) -> None:
                results = [acquired(result) for result in response.acquire.results]
                answer.set(self._answers(answer).taken(response.number, results, call.acquire))

            def grants(response: stream_pb2.ConverseResponse) -> BlockRun:
                return NO_BLOCKS if answer.abandoned else granted_runs(response)

            call.acquire.pool_id = self._pool.id
            return Outgoing(lambda _: call, self._unless_refused(answer, take), answer.fail, grants=grants)

        taken: list[Acquired] = self.held.stream.ask(make, timeout_s)
        return taken

    def lease(
        self, least: int, want: int, *, growth: bool = False, wait_s: float = 0.0, timeout_s: float | None = None
    ) -> Leased:
        """Leases up to `want` fresh blocks, all or nothing below `least`, or raises PoolExhausted.

        `growth`, for requests that run already, goes before all who wait, and never waits. Otherwise, with `wait_s`, it
        waits for room for so long: there are no blocks yet, and `grant` tells what comes. Raises Unavailable as
        `acquire` does.
        """
        message = request(
            blocks_pb2.LeaseRequest,
            least_block_count=least,
            want_block_count=want,
            growth=growth,
        )
        if wait_s:
            message.wait.CopyFrom(duration("wait_s", wait_s))

        def make(answer: Answer) -> Outgoing:
            def take(response: stream_pb2.ConverseResponse) -> None:
                result = Acquired(leased=run_of(response.lease.leased), waiting=response.lease.waiting)
                taken = self._answers(answer).taken(response.number, [result], None)
                answer.set(Leased(taken[0].leased, taken[0].grant) if taken else None)

            message.pool_id = self._pool.id
            call = stream_pb2.ConverseRequest(lease=message)
            return Outgoing(lambda _: call, self._unless_refused(answer, take), answer.fail)

        leased: Leased = self.held.stream.ask(make, timeout_s)
        return leased

    def commit(self, chains: Sequence[CommitChain]) -> None:
        """Publishes leased blocks that have been written; not awaited.

        Waits for the device first [C14]. One chain may be the parent of the next. A block whose content is there
        already stays the session's own until it is released. Refused with BlockNotHeld, a chain as a whole.
        """
        message = blocks_pb2.CommitBlocksRequest(
            pool_id=self._pool.id, chains=[each.message(self.version) for each in chains]
        )
        call = _sendable(stream_pb2.ConverseRequest(commit_blocks=message))
        self._pool.wait_for_device(self._pool.order.before_commit)
        self._send(call, lambda response: (result.status for result in response.commit_blocks.results))

    def abandon(self, chains: Sequence[Chain]) -> None:
        """Says that the session does not compute chains any more, which it has acquired to compute; not awaited.

        Of each only contents and namespace count. Others who wait for it look again at once. Its blocks stay held, and
        chains of other contents are computed as before, also where they begin alike. So it is not to be said where
        another of the caller's requests computes just the same. What is committed already, or not known, is nothing.
        """
        message = blocks_pb2.AbandonRequest(
            pool_id=self._pool.id, chains=[each.message(self.version) for each in chains]
        )
        call = _sendable(stream_pb2.ConverseRequest(abandon=message))
        self._send(call, lambda response: response.abandon.statuses)

    def release(self, blocks: BlockRun) -> None:
        """Ends the session's hold on blocks of any kind, those that are named first to be evicted first; not awaited.

        Waits for the device first [C14]. A committed block goes with the last one behind it that the session holds.
        """
        self.held.own.require_known(blocks)
        self._pool.wait_for_device(self._pool.order.before_release)
        self.held.stream.require_session()
        with self._pool.link.guard:
            self.held.release(blocks)

    def invalidate(self, blocks: BlockRun, *, timeout_s: float | None = None) -> Invalidated:
        """Takes back committed blocks whose bytes are not what they were committed for, with those behind them.

        All that the session holds of that, shadows too, are leased blocks then, to write anew. Where another holds one
        of them it stays as it is, BlockHeld: bump the namespace. Raises Unavailable where no answer comes: all of that
        may be gone or none. So end every request that has the contents of a named block and of all before it, whatever
        blocks it has for them, and release these.
        """
        self.held.own.require_known(blocks)
        message = blocks_pb2.InvalidateBlocksRequest(pool_id=self._pool.id, blocks=table_of(blocks))

        def make(answer: Answer) -> Outgoing:
            def take(response: stream_pb2.ConverseResponse) -> None:
                result = response.invalidate_blocks
                leased, before = run_of(result.leased), run_of(result.invalidated)
                self.held.own.discard(before)
                if answer.abandoned:
                    self.held.release_fresh([leased])
                self.held.own.add(leased)
                statuses = (refusals.from_item(each) if each.code else None for each in result.statuses)
                answer.set(Invalidated(leased, before, tuple(statuses)))

            call = stream_pb2.ConverseRequest(invalidate_blocks=message)
            return Outgoing(lambda _: call, self._unless_refused(answer, take), answer.fail)

        invalidated: Invalidated = self.held.stream.ask(make, timeout_s)
        return invalidated

    def bump_namespace(self, version: str = "", *, timeout_s: float | None = None) -> str:
        """Moves the session to another version of its weights, where none is named to one of its own; returns it.

        From then on an empty version of a Namespace means this one, in every call on the pool. What runs keeps its own.
        """
        bumped: str = self.held.stream.ask(lambda answer: self._bumping(version, answer), timeout_s)
        return bumped

    def flush(self, timeout_s: float | None = None) -> None:
        """Waits until all calls that were made by now have taken effect; raises what one of them was refused with.

        Raises DeadlineExceeded, or ServiceAway, when they have not in time: they will.
        """
        self.held.stream.flush(timeout_s)
        with self._pool.link.guard:
            refused, self.held.refused = self.held.refused, []
        if refused:
            raise refused[0]

    @property
    def version(self) -> str:
        """The session's version in this pool; empty until `bump_namespace`."""
        return self._pool.calls.version

    @property
    def status(self) -> StatusPage:
        """How the pool stands, to read without a call; the page itself is asked for once an epoch."""
        page, pool_id = self._page, self._pool.id
        if page is None or page.pool_id != pool_id:
            page = self._page = self._pool.link.on_side(lambda side: StatusPage.attach(side, pool_id))
        return page

    def moved(self) -> None:
        """The pool is that of another epoch; for the harbor, under the guard."""
        self.held.stream.on_recall(self._pool.id, self._recalled)
        if self.version:
            self.held.stream.put(self._bumping(self.version, Answer()))

    def close(self) -> None:
        """Lets go of the status page, as the pool is not open here any more; for the harbor."""
        self.held.stream.forget_pool(self._pool.id)
        self.held.stream.signs.drop(self.computing)
        if self._page is not None:
            self._page.close()

    def _send(
        self,
        call: stream_pb2.ConverseRequest,
        statuses: Callable[[stream_pb2.ConverseResponse], Iterable[types_pb2.ItemStatus]],
    ) -> None:
        """Sends what is not awaited, and may be sent twice; `statuses` are those of its parts in the answer."""

        def take(response: stream_pb2.ConverseResponse) -> None:
            self.held.refuse_if_refused(response)
            for status in statuses(response):
                if status.code:
                    self.held.refuse(refusals.from_item(status))

        self.held.stream.send(Outgoing(lambda _: call, take, self.held.refuse, repeatable=True))

    def _tell_computing(self) -> None:
        """Says that the session is at work; in the thread that sends. Nobody waits for the answer."""
        call = stream_pb2.ConverseRequest(computing=blocks_pb2.ComputingRequest(pool_id=self._pool.id))
        with self._pool.link.guard:
            self.held.stream.put(Outgoing(lambda _: call, _nothing, _nothing))

    def _answers(self, answer: Answer) -> Answers:
        return Answers(self.held, lambda: self._pool.link.guard, answer)

    def _bumping(self, version: str, answer: Answer) -> Outgoing:
        message = request(blocks_pb2.BumpNamespaceRequest, pool_id=self._pool.id, version=version)

        def take(response: stream_pb2.ConverseResponse) -> None:
            self._pool.calls.version = response.bump_namespace.version
            answer.set(response.bump_namespace.version)

        call = stream_pb2.ConverseRequest(bump_namespace=message)
        return Outgoing(lambda _: call, self._unless_refused(answer, take), answer.fail, repeatable=True)

    def _unless_refused(
        self, answer: Answer, take: Callable[[stream_pb2.ConverseResponse], object]
    ) -> Callable[[stream_pb2.ConverseResponse], None]:
        """Returns what fails the answer with the refusal of its request, and takes in any other response by `take`."""

        def taken(response: stream_pb2.ConverseResponse) -> None:
            if response.WhichOneof("result") == "refusal":
                answer.fail(self._pool.link.standing.meant(refusals.from_item(response.refusal)))
            else:
                take(response)

        return taken

    def _recalled(self, block_count: int) -> None:
        """Gives leased blocks back; in the stream's thread."""
        for stock in [*self.held.stocks]:
            block_count -= stock.give_back(block_count)
        if block_count > 0 and self.on_recall is not None:
            blocks = self.on_recall(block_count)
            with self._pool.link.guard:
                self.held.release(blocks)


def _nothing(_: object) -> None:
    pass


def _sendable(call: stream_pb2.ConverseRequest) -> stream_pb2.ConverseRequest:
    """Returns the call, or raises MessageTooLarge: the transport would end the whole stream for it."""
    if (size_bytes := call.ByteSize()) > channel.MAX_MESSAGE_BYTES:
        raise MessageTooLarge(
            f"the call has {size_bytes} bytes, at most {channel.MAX_MESSAGE_BYTES} are carried: make it in several",
            metadata={"sizeBytes": str(size_bytes), "maxMessageBytes": str(channel.MAX_MESSAGE_BYTES)},
        )
    return call
