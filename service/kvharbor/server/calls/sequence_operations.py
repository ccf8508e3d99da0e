"""What calls on sequences do: message to value, value to message. Unary calls and streams share it."""

# Or the annotations of inner functions are evaluated in every call.
from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from google.protobuf import timestamp_pb2

from kvharbor.pool import Adopted, Awaited, Committed, Extension, Fork, HandedOff, Pool, Prompt, SequenceView
from kvharbor.pool.errors import InvalidField, PoolError, PoolExhausted, SequenceNotFound
from kvharbor.pool.steps import Steps
from kvharbor.server.calls.batches import each
from kvharbor.server.calls.handles import named, number_in, with_handle
from kvharbor.server.calls.withdrawal import Withdrawal
from kvharbor.server.messages.status import item_status
from kvharbor.server.messages.traffic import miss_message
from kvharbor.server.messages.wire import (
    adopted_message,
    commit_of,
    duration_message,
    little_endian,
    pending_message,
    prompt_of,
    put_shadows,
    seconds_of,
    sequence_message,
)
from kvharbor.server.pools.pools import Pools
from kvharbor.server.pools.served_pool import OpenedPool
from kvharbor.server.scheduling.applications import Application, Patience
from kvharbor.server.session_errors import SessionUnknown
from kvharbor.server.sessions.session import Session
from kvharbor.v1 import cache_service_pb2 as pb
from kvharbor.v1 import types_pb2

A = TypeVar("A")
Item = TypeVar("Item")
Result = TypeVar("Result")


class SequenceOperations:
    """What a session does with its sequences in a pool that it has open. Whatever is refused is raised."""

    def __init__(self, pools: Pools, *, handoff_ttl_s: float) -> None:
        self._pools = pools
        self._handoff_ttl_s = handoff_ttl_s

    async def allocate(
        self, session: Session, opened: OpenedPool, request: pb.AllocateRequest, patience: Patience | None = None
    ) -> pb.AllocateResponse:
        """Allocates; `patience` is for who wants to know of its waits, or to end them."""
        wait_s = seconds_of("wait", request.wait) if request.HasField("wait") else 0.0
        pending_wait_s = seconds_of("pending_wait", request.pending_wait) if request.HasField("pending_wait") else 0.0
        most = request.max_cached_tokens if request.HasField("max_cached_tokens") else None
        prompt = prompt_of(request, opened.version)
        pool, number, reserve_tokens = opened.served.pool, session.number, request.reserve_tokens
        request_id, group = request.request_id, request.group
        withdrawal = Withdrawal(session, opened, request_id)
        recorder, tenant = opened.served.recorder, session.peer.tenant
        arrival = await recorder.arrived(prompt, tenant) if recorder.is_on else None
        if session.ended:
            raise SessionUnknown(session.cause)

        def start(allocate: Callable[..., Steps[A]]) -> Steps[A]:
            granted: A = yield from allocate(
                number,
                prompt,
                reserve_tokens=reserve_tokens,
                max_cached_tokens=most,
                request_id=request_id,
                group=group,
            )
            if isinstance(granted, SequenceView):
                withdrawal.note(granted.number)
                if arrival is not None:
                    recorder.admitted(arrival, granted)
            elif isinstance(granted, Awaited):
                withdrawal.note_wait(granted)
            return granted

        admission = opened.served.admission
        token_count = len(prompt.token_ids) // 4 + reserve_tokens
        application = Application(
            session,
            session.peer.tenant,
            opened.turns,
            functools.partial(start, pool.allocate),
            -(-token_count // pool.config.block_tokens),
            lambda: _missing_blocks(pool, session.peer.tenant, prompt, most, token_count),
            patience or Patience(),
        )
        with withdrawal:
            if pending_wait_s > 0:
                after_others = functools.partial(start, pool.allocate_unless_pending)
                view = await admission.allocate_after_others(application, after_others, wait_s, pending_wait_s)
            else:
                view = await admission.allocate(application, wait_s)
        return pb.AllocateResponse(
            sequence=sequence_message(view, opened.handle_prefix),
            pending=pending_message(view.pending),
            miss=miss_message(view.miss),
        )

    async def extend(self, session: Session, opened: OpenedPool, request: pb.ExtendRequest) -> pb.ExtendResponse:
        """Gives sequences more blocks; before all who wait."""
        pool, number = opened.served.pool, session.number

        def extend(item: pb.ExtendItem) -> Steps[pb.ExtendResult]:
            sequence = self._number(opened, item.sequence_id)
            known = item.known_block_count if item.HasField("known_block_count") else None
            try:
                added: Extension = yield from pool.extend(number, sequence, item.capacity_tokens, known)
            except PoolError as refused:
                if isinstance(refused, PoolExhausted):
                    opened.served.admission.lacks_room(session, refused)
                status = item_status(with_handle(refused, opened))
                try:
                    unchanged = yield from pool.extend(number, sequence, 0)
                except SequenceNotFound:
                    return pb.ExtendResult(status=status)
                return pb.ExtendResult(status=status, capacity_tokens=unchanged.capacity_tokens)
            return pb.ExtendResult(
                status=types_pb2.ItemStatus(),
                added=types_pb2.BlockTable(
                    block_ids=little_endian("I", added.block_ids),
                    generations=little_endian("Q", added.generations),
                ),
                capacity_tokens=added.capacity_tokens,
            )

        results = await self._each(opened, request.items, extend, lambda status: pb.ExtendResult(status=status))
        return pb.ExtendResponse(results=results)

    async def commit(self, session: Session, opened: OpenedPool, request: pb.CommitRequest) -> pb.CommitResponse:
        """Publishes what sequences have written."""
        pool, number = opened.served.pool, session.number

        def commit(item: pb.CommitItem) -> Steps[pb.CommitResult]:
            sequence = self._number(opened, item.sequence_id)
            committed: Committed = yield from pool.commit(number, sequence, commit_of(item))
            return (yield from _commit_result(committed))

        results = await self._each(opened, request.items, commit, lambda status: pb.CommitResult(status=status))
        return pb.CommitResponse(results=results)

    async def fork(self, session: Session, opened: OpenedPool, request: pb.ForkRequest) -> pb.ForkResponse:
        """Makes children of a sequence."""
        sequence = self._number(opened, request.sequence_id)
        served = opened.served

        withdrawal = Withdrawal(session, opened, request.request_id)

        def start() -> Steps[Fork]:
            made: Fork = yield from named(
                opened,
                served.pool.fork(
                    session.number,
                    sequence,
                    request.child_count,
                    reserve_tokens=request.reserve_tokens,
                    request_id=request.request_id,
                    group=request.group,
                ),
            )
            withdrawal.note(*made.children)
            return made

        with withdrawal:
            try:
                children = await served.owner.fork(opened.turns, start, served.copy)
            except PoolExhausted as refused:
                served.admission.lacks_room(session, refused)
                raise
        return pb.ForkResponse(children=[sequence_message(child, opened.handle_prefix) for child in children])

    async def handoff(self, session: Session, opened: OpenedPool, request: pb.HandoffRequest) -> pb.HandoffResponse:
        """Gives a sequence to whoever has the token."""
        sequence = self._number(opened, request.commit.sequence_id)
        commit = commit_of(request.commit)
        owner, token, ttl_s = opened.served.owner, secrets.token_urlsafe(24), self._handoff_ttl_s

        def start() -> Steps[tuple[HandedOff, float]]:
            now = owner.clock()
            handed: HandedOff = yield from named(
                opened, owner.pool.handoff(session.number, sequence, commit, token=token, expires_at=now + ttl_s)
            )
            return handed, handed.expires_at - now

        handed, left_s = await owner.run(opened.turns, start)
        owner.reschedule()
        return pb.HandoffResponse(
            handoff_token=handed.token, expire_time=expire_time(left_s), ttl=duration_message(left_s)
        )

    async def adopt(self, session: Session, opened: OpenedPool, request: pb.AdoptRequest) -> pb.AdoptResponse:
        """Takes a sequence that was handed off."""
        pool = opened.served.pool

        def adopt() -> Steps[Adopted]:
            yield from ()
            return pool.adopt(session.number, request.handoff_token, request_id=request.request_id, group=request.group)

        adopted = await opened.served.owner.run(opened.turns, adopt)
        return adopted_message(adopted, opened.handle_prefix)

    async def release(self, session: Session, opened: OpenedPool, request: pb.ReleaseRequest) -> pb.ReleaseResponse:
        """Ends sequences."""
        pool, number = opened.served.pool, session.number

        def ended(item: pb.ReleaseItem) -> Steps[int]:
            target = item.WhichOneof("target")
            if target == "sequence_id":
                return pool.release(number, self._number(opened, item.sequence_id))
            if target == "request_id":
                return pool.release_request(number, item.request_id)
            if target == "group":
                return pool.release_group(number, item.group)
            raise InvalidField(
                field="target", value="empty", limit="sequence_id, request_id or group", remedy="name what to end"
            )

        def release(item: pb.ReleaseItem) -> Steps[pb.ReleaseResult]:
            count: int = yield from ended(item)
            status = types_pb2.ItemStatus()
            return pb.ReleaseResult(status=status, already_released=not count, released_sequence_count=count)

        results = await self._each(opened, request.items, release, lambda status: pb.ReleaseResult(status=status))
        return pb.ReleaseResponse(results=results)

    def _number(self, opened: OpenedPool, sequence_id: str) -> int:
        return number_in(sequence_id, opened, self._pools)

    async def _each(
        self,
        opened: OpenedPool,
        items: Sequence[Item],
        operate: Callable[[Item], Steps[Result]],
        refusal: Callable[[types_pb2.ItemStatus], Result],
    ) -> list[Result]:
        return await opened.served.owner.run(opened.turns, lambda: each(opened, "items", items, operate, refusal))


def expire_time(ttl_s: float) -> timestamp_pb2.Timestamp:
    """Returns now and `ttl_s` by the wall clock, for people: the monotonic clock decides."""
    stamp = timestamp_pb2.Timestamp()
    stamp.FromNanoseconds(time.time_ns() + round(ttl_s * 1e9))
    return stamp


def _missing_blocks(pool: Pool, tenant: str, prompt: Prompt, most: int | None, token_count: int) -> Steps[int]:
    """Tells how many blocks a prompt needs beyond its match."""
    presence = yield from pool.lookup(tenant, prompt, most)
    return -(-(token_count - presence.cached_tokens) // pool.config.block_tokens)


def _commit_result(committed: Committed) -> Steps[pb.CommitResult]:
    result = pb.CommitResult(status=types_pb2.ItemStatus(), committed_tokens=committed.committed_tokens)
    yield from put_shadows(result.shadows, committed.shadows)
    return result
