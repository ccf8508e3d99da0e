"""A sequence of the asyncio client."""

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Self

from kvharbor.client.batches import Commit, CommitBatch, only
from kvharbor.client.commit_refusals import room_refusal
from kvharbor.client.errors import EpochEnded, SequenceNotFound, SessionGone
from kvharbor.client.results import CommitResult, ExtraKey
from kvharbor.client.sequence_state import SequenceState
from kvharbor.client.tail import Tail
from kvharbor.client.tokens import Tokens
from kvharbor.v1 import cache_service_pb2 as cache
from kvharbor.v1 import types_pb2

if TYPE_CHECKING:
    from kvharbor.client.aio.pool import Pool


class Sequence(SequenceState):
    """A held prompt: what was there is readable, the rest is writable. Belongs to one task at a time.

    Leaving its `async with` releases it. Await each call before the next: calls that are under way together
    have no order.
    """

    def __init__(self, pool: "Pool", message: types_pb2.Sequence, tail: Tail) -> None:
        self._pool = pool
        super().__init__(message, pool.block_tokens, tail)
        pool.sequences.add(self)

    @classmethod
    def of(cls, pool: "Pool", message: types_pb2.Sequence, tail: Tail) -> Self:
        """Returns the object of a sequence: the one that is here, where a call is repeated, or a new one."""
        known = pool.sequences.of(message.sequence_id)
        return known if isinstance(known, cls) else cls(pool, message, tail)

    def __del__(self) -> None:
        if not self.ended and self._pool.link.session_lives:
            self.warn_forgotten()

    async def extend(self, token_count: int) -> None:
        """Adds capacity for so many more tokens, in whole blocks.

        Raises PoolExhausted when there is none: release a sequence, e.g. by preempting one.
        """
        only(await self._pool.extend_many([(self, token_count)]))

    async def commit(
        self, computed_tokens: int, new_tokens: Tokens = (), *, extra_keys: Items[ExtraKey] = ()
    ) -> CommitResult:
        """Declares the KV of the first computed_tokens tokens written and visible, and publishes full blocks.

        `new_tokens` are the ids from token_count on; their own KV may come with a later commit. A commit that raises
        has not moved token_count: the next one names its tokens again [C5]. What is written by a device is waited for
        first [C14]. While the service is away the commit is taken in here, and the result is `pending` [C11].
        """
        return only(await self._pool.commit_many([Commit(self, computed_tokens, new_tokens, extra_keys)]))

    async def fork(self, child_count: int, *, reserve_tokens: int = 0, group: str = "") -> list["Sequence"]:
        """Returns children that share the committed blocks and own a copy of the rest that is computed.

        The service makes the copy: what a device still writes is waited for first [C14].
        """
        await self._pool.wait_for_device(self._pool.order.before_commit)
        self.require_usable()
        call = self._pool.calls.fork(self.id, child_count, reserve_tokens=reserve_tokens, group=group)

        def born(reply: cache.ForkResponse) -> list[Sequence]:
            return [Sequence(self._pool, child, self.tail.of_child(child)) for child in reply.children]

        try:
            return await self._pool.link.run(call, take=born)
        except SequenceNotFound:
            self.require_held()  # it may have been lost while the call waited
            raise

    async def handoff(self, computed_tokens: int, new_tokens: Tokens = ()) -> str:
        """Commits and gives the sequence away; returns the secret token to adopt it with, once.

        The sequence ends here: this process touches its blocks no more. A token that nobody adopts within the
        service's limit (30 s by default) releases it, and so does the end of the service's process. Without an
        answer it can be repeated, with the same arguments, or released. Waits for the device first [C14].
        """
        order = self._pool.order
        await self._pool.wait_for_device(order.before_commit, order.before_release)
        (commit,) = await self._pool.settled([Commit(self, computed_tokens, new_tokens)])
        item = self.commit_item(commit.computed_tokens, commit.new_tokens, leaving=True)
        if (refusal := room_refusal(self, item)) is not None:
            raise refusal
        batch = CommitBatch(self._pool.calls, [(self, item)])
        try:
            with batch.answered(leaving=True):
                return await self._pool.link.run(
                    self._pool.calls.handoff(item), take=self.handed_off, sending=batch.sending
                )
        except SequenceNotFound:
            # It may have been lost while the call waited; or the process that had given it away has ended, with it.
            self.leave()
            self.require_not_ended()
            raise

    async def release(self) -> None:
        """Ends the sequence: committed blocks stay cached, the rest is free. Repeating it does nothing.

        Waits for the device first [C14]; when that fails the sequence is not released. A session or an epoch that has
        ended has released it already, so that is no error.
        """
        if self.ended:
            return
        call = self._pool.calls.release([cache.ReleaseItem(sequence_id=self.id)])
        try:
            await self._pool.wait_for_device(self._pool.order.before_release)
            await self._pool.link.run(call, take=self.released, here=lambda: self._pool.sequences.forget(self))
        except (SessionGone, EpochEnded):
            self.forget()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, *rest: object) -> None:
        try:
            await self.release()
        except Exception:
            # The error that ended the block says more than one that follows from it, such as a device's.
            if exc_type is None:
                raise
