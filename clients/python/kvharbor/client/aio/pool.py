"""Pools of the asyncio client: with their memory, for workers, and without, for tools."""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import Any

from kvharbor.client import answers, releases, traffic
from kvharbor.client.aio.link import Link, Watch
from kvharbor.client.aio.ordering import wait_for
from kvharbor.client.aio.recording import Recording
from kvharbor.client.aio.sequence import Sequence
from kvharbor.client.batches import Commit, CommitBatch, ExtendBatch, Repeats
from kvharbor.client.calls import NO_NAMESPACE, PoolCalls
from kvharbor.client.errors import HarborError
from kvharbor.client.hints import NO_HINTS, Hints, hints_message
from kvharbor.client.memory import PoolMemory
from kvharbor.client.ordering import NO_ORDER, Mark, StreamOrder
from kvharbor.client.results import CommitResult, ExtraKey, Lookup, Namespace, PoolStats, Warm, WarmOrder, WarmTask
from kvharbor.client.runs import BlockRun, OwnBlocks
from kvharbor.client.tail import Tail
from kvharbor.client.tokens import Tokens
from kvharbor.gpumem import BlockViews
from kvharbor.v1 import cache_service_pb2 as cache


class PoolHandle:
    """A pool by name, without its memory: what tools and operators use. Tasks may share it."""

    def __init__(self, link: Link, pool_id: str, name: str, tenant: str) -> None:
        self.id = pool_id
        self.name = name
        self.tenant = tenant
        self.link = link
        self.calls = PoolCalls(pool_id)

    async def lookup(
        self,
        tokens: Tokens,
        *,
        max_cached_tokens: int | None = None,
        namespace: Namespace = NO_NAMESPACE,
        extra_keys: Items[ExtraKey] = (),
    ) -> Lookup:
        """Tells what of a prompt is there. Changes nothing, recency neither."""
        call = self.calls.lookup(
            tokens, namespace=namespace, extra_keys=extra_keys, max_cached_tokens=max_cached_tokens
        )
        return answers.lookup(await self.link.run(call))

    async def warmup_present(
        self,
        tokens: Tokens,
        name: str,
        ttl_s: float | None = None,
        *,
        namespace: Namespace = NO_NAMESPACE,
        extra_keys: Items[ExtraKey] = (),
    ) -> Warm[Any]:
        """Pins what is there of a prefix against eviction, under a name, and reserves nothing for the rest."""
        call = self.calls.warmup(
            tokens, namespace=namespace, extra_keys=extra_keys, ttl_s=ttl_s, name=name, fill=cache.WARMUP_FILL_NOBODY
        )
        return answers.warm(await self.link.run(call), None)

    async def warmup_by_engine(
        self,
        tokens: Tokens,
        name: str,
        ttl_s: float | None = None,
        *,
        wait_s: float = 0.0,
        namespace: Namespace = NO_NAMESPACE,
        extra_keys: Items[ExtraKey] = (),
    ) -> WarmOrder:
        """Pins what is there of a prefix, and has an engine compute the rest that accepts warm tasks of this pool.

        Returns at once, or after at most `wait_s` when the prefix is whole or the task has ended otherwise. The
        task waits for an engine even if there is none yet. Raises WarmBudgetExceeded, TooManyWarmTasks.
        """
        call = self.calls.warmup(
            tokens,
            namespace=namespace,
            extra_keys=extra_keys,
            ttl_s=ttl_s,
            wait_s=wait_s,
            name=name,
            fill=cache.WARMUP_FILL_ENGINE,
        )
        return answers.warm_order(await self.link.run(call))

    async def unwarm(self, name: str) -> None:
        """Ends a pin and the task to fill it, or raises PinNotFound."""
        await self.link.run(self.calls.unwarm(name))

    async def evict_block(self, block_id: int, generation: int) -> int:
        """Removes a cached block and its descendants, for administrators; returns how many blocks are free now."""
        return (await self.link.run(self.calls.evict_block(block_id, generation))).evicted_block_count

    async def evict_unheld(self) -> int:
        """Removes every cached block that nobody holds, for administrators; returns how many."""
        return (await self.link.run(self.calls.evict_unheld())).evicted_block_count

    async def stats(self) -> PoolStats:
        """Returns one consistent snapshot."""
        return answers.only_pool(await self.link.run(self.calls.stats()))

    def watch(self, start_revision: int = 0) -> Watch:
        """Streams the pool's index and its changes; from 0 the index comes first."""
        return self.link.watch(self.calls.watch(start_revision))

    async def record(self) -> Recording:
        """Streams the pool's requests as they end, for administrators, for a trace: never what they say."""
        return await self.link.record(self.calls.record())


class Pool(PoolHandle):
    """An open pool with its memory mapped. Ends with its harbor. Tasks may share it.

    In a new epoch (`on_epoch` of `connect`) `id` and `memory` change, and `views` show the new memory. `order` says
    what a device has to have done before commits and releases [C14].
    """

    def __init__(
        self,
        link: Link,
        name: str,
        memory: PoolMemory,
        *,
        created: bool,
        asked_bytes: int = 0,
        order: StreamOrder = NO_ORDER,
    ) -> None:
        super().__init__(link, memory.pool_id, name, link.session.tenant if link.session else "")
        self.memory = memory
        self.asked_bytes = asked_bytes
        self.created = created
        self.order = order
        self.descriptor = memory.descriptor
        self.block_tokens = memory.descriptor.layout.block_tokens
        self.sequences = releases.LiveSequences()
        self.own_blocks = OwnBlocks(memory.descriptor.block_count)
        self.batches = ()

    @property
    def part(self) -> int:
        """Which part is mapped here: as many as the layout's tp_size have the same blocks."""
        return self.memory.part

    @property
    def views(self) -> BlockViews:
        """The views of the part that is mapped here."""
        return self.memory.views

    async def wait_for_device(self, *marks: Mark) -> None:
        """Waits for the work that methods of `order` mark, as far as the harbor is open [C14]."""
        # First: a fork has no use of the device, and no claim to the blocks.
        self.link.require_open()
        await wait_for(*(mark() for mark in marks))

    async def allocate(
        self,
        tokens: Tokens,
        *,
        reserve_tokens: int = 0,
        max_cached_tokens: int | None = None,
        namespace: Namespace = NO_NAMESPACE,
        extra_keys: Items[ExtraKey] = (),
        request_id: str | None = None,
        group: str = "",
        wait_s: float = 0.0,
        pending_wait_s: float = 0.0,
        hints: Hints = NO_HINTS,
    ) -> Sequence:
        """Matches a prompt, holds what is there and reserves the rest, in one step.

        `max_cached_tokens` bounds the match: None all tokens but one, as a model computes at least one for its
        logits; 0 no reuse. `wait_s` is how long to wait for room. Idempotent by `request_id` while the sequence
        lives; without one it gets its own, so that a call that is cancelled or runs out of time leaves nothing
        held [C4].

        `pending_wait_s` is how long to wait, before that, for what another session is computing of the prompt: until
        it has committed that, or is gone or has committed nothing for 2 s. Whatever ends the wait, what is not there
        then is the caller's to compute. `pending` of the sequence tells what others are computing of it.

        `hints` may make eviction choose better; they are about the blocks that this request publishes.

        Raises RequestTooLarge when it can never fit, PoolExhausted when it does not fit now.
        """
        call = self.calls.allocate(
            tokens,
            namespace=namespace,
            extra_keys=extra_keys,
            request_id=request_id,
            wait_s=wait_s,
            pending_wait_s=pending_wait_s,
            reserve_tokens=reserve_tokens,
            max_cached_tokens=max_cached_tokens,
            group=group,
            hints=hints_message(hints),
        )

        def granted(reply: cache.AllocateResponse) -> Sequence:
            sequence = Sequence.of(self, reply.sequence, Tail.of_prompt(call.request, reply.sequence))
            sequence.miss = traffic.miss(reply)
            sequence.pending = answers.pending(reply)
            return sequence

        return await self.link.run(self.sequences.sparing(call), take=granted)

    async def adopt(self, handoff_token: str, *, request_id: str | None = None, group: str = "") -> Sequence:
        """Takes over a sequence that was handed off, or raises HandoffNotFound."""
        call = self.calls.adopt(handoff_token, request_id=request_id, group=group)

        def adopted(reply: cache.AdoptResponse) -> Sequence:
            return Sequence.of(self, reply.sequence, Tail.of_adopted(reply))

        return await self.link.run(self.sequences.sparing(call), take=adopted)

    async def extend_many(self, extends: Iterable[tuple[Sequence, int]]) -> list[HarborError | None]:
        """Extends several sequences in one call; returns each one's refusal, or None."""
        batch = ExtendBatch(self.calls, extends)
        with batch.answered():
            return await self.link.run(batch.call, take=batch.outcomes)

    async def commit_many(self, commits: Iterable[Commit[Sequence]]) -> list[CommitResult | HarborError]:
        """Commits several sequences in one call; returns each one's result or refusal, in order.

        Waits for the device first [C14]. While the service is away they are taken in here, and the results are
        `pending` [C11].
        """
        await self.wait_for_device(self.order.before_commit)
        return await self._commit(CommitBatch.of(self.calls, await self.settled(commits)))

    async def settled(self, commits: Iterable[Commit[Sequence]]) -> list[Commit[Sequence]]:
        """Repeats what ended without an answer; returns the commits without what has taken effect by that [C5]."""
        repeats = Repeats(self.calls, commits)
        if repeats.batch is not None:
            await self._commit(repeats.batch)
        return repeats.rest()

    async def _commit(self, batch: CommitBatch) -> list[CommitResult | HarborError]:
        if batch.is_empty:
            return batch.here()
        with batch.answered():
            return await self.link.run(batch.call, take=batch.outcomes, here=batch.here, sending=batch.sending)

    async def release(self, *, request_id: str | None = None, group: str | None = None) -> int:
        """Ends the session's sequences of a request_id or of a group; returns how many that were.

        Waits for the device first [C14].
        """
        item = releases.item(request_id, group)
        await self.wait_for_device(self.order.before_release)
        named = self.sequences.named(item)

        def released(reply: cache.ReleaseResponse) -> int:
            count = releases.sequence_count(reply)
            for sequence in named:
                sequence.forget()
            return count

        def forgotten() -> int:
            known = self.sequences.named(item)
            for sequence in known:
                self.sequences.forget(sequence)
            return len(known)

        return await self.link.run(self.calls.release([item]), take=released, here=forgotten)

    async def warmup(
        self,
        tokens: Tokens,
        name: str,
        ttl_s: float | None = None,
        *,
        namespace: Namespace = NO_NAMESPACE,
        extra_keys: Items[ExtraKey] = (),
    ) -> Warm[Sequence]:
        """Pins a prefix against eviction, for the tenant, under a name, until `ttl_s` or unwarm.

        What is missing comes back as a sequence to compute and commit: where one of this session fills the pin already,
        that one. Raises WarmBudgetExceeded.
        """
        call = self.calls.warmup(tokens, namespace=namespace, extra_keys=extra_keys, ttl_s=ttl_s, name=name)

        def warmed(reply: cache.WarmupResponse) -> Warm[Sequence]:
            missing = None
            if reply.HasField("sequence"):
                missing = Sequence.of(self, reply.sequence, Tail.of_prompt(call.request, reply.sequence, name))
            return answers.warm(reply, missing)

        return await self.link.run(call, take=warmed)

    async def claim_warm_task(self) -> "WarmTask[Pool, Sequence]":
        """Takes the prefix that waits longest for an engine to compute it; raises WarmTaskNotFound if none does.

        `Harbor.next_warm_task` waits for one, in all of its pools.
        """

        def claimed(reply: cache.ClaimWarmTaskResponse) -> "WarmTask[Pool, Sequence]":
            tail = Tail.of_prompt(reply, reply.sequence, reply.name)
            return answers.warm_task(reply, self, Sequence.of(self, reply.sequence, tail))

        return await self.link.run(self.calls.claim_warm_task(), take=claimed)

    def blocks_lost(self, lost: BlockRun, cause: HarborError | None) -> None:
        """Has none that could be lost: block calls are of the synchronous client."""

    def moved(self, pool_id: str) -> None:
        """Takes its id in a new epoch; for the harbor."""
        self.id = self.calls.pool_id = pool_id
