"""Calls on sequences: Allocate, Extend, Commit, Fork, Handoff, Adopt, Release. They only translate."""

import re
import secrets
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from google.protobuf import timestamp_pb2

from kvharbor.pool import Committed, Extension, SequenceView, Shadow, validate
from kvharbor.pool.errors import InvalidField, InvariantViolation, PoolError, SequenceNotFound
from kvharbor.pool.steps import Steps
from kvharbor.server.admission import Application
from kvharbor.server.errors import ServerError, StaleEpoch
from kvharbor.server.gate import Callers, Context, Gate, answered
from kvharbor.server.pools import Pools
from kvharbor.server.served_pool import OpenedPool
from kvharbor.server.sessions import Session
from kvharbor.server.status import item_status
from kvharbor.server.wire import (
    commit_of,
    duration_message,
    little_endian,
    prompt_of,
    seconds_of,
    sequence_message,
)
from kvharbor.v1 import cache_service_pb2 as pb
from kvharbor.v1 import cache_service_pb2_grpc as rpc
from kvharbor.v1 import types_pb2

Item = TypeVar("Item")
Result = TypeVar("Result")
T = TypeVar("T")

MAX_ITEMS = 8192
"""Items of a batch: so that the reply fits in a message even if each is refused."""

# Between so many items of a batch, and so many entries of a result, others are served.
_ITEMS_A_SLICE = 16
_SHADOWS_A_SLICE = 1024


class SequenceCalls(rpc.CacheServiceServicer):
    """The calls of CacheService that work on the caller's sequences."""

    def __init__(self, gate: Gate, callers: Callers, pools: Pools, *, handoff_ttl_s: float) -> None:
        self.gate = gate
        self._callers = callers
        self._pools = pools
        self._handoff_ttl_s = handoff_ttl_s

    @answered
    async def Allocate(self, request: pb.AllocateRequest, context: Context) -> pb.AllocateResponse:
        session, opened = self._opened(context, request.pool_id)
        wait_s = seconds_of("wait", request.wait) if request.HasField("wait") else 0.0
        most = request.max_cached_tokens if request.HasField("max_cached_tokens") else None
        prompt = prompt_of(request)
        pool, number, reserve_tokens = opened.served.pool, session.number, request.reserve_tokens
        request_id, group = request.request_id, request.group

        def start() -> Steps[SequenceView]:
            return pool.allocate(
                number,
                prompt,
                reserve_tokens=reserve_tokens,
                max_cached_tokens=most,
                request_id=request_id,
                group=group,
            )

        application = Application(session, session.peer.tenant, opened.turns, start, prompt, reserve_tokens, most)
        view = await opened.served.admission.allocate(application, wait_s)
        return pb.AllocateResponse(sequence=sequence_message(view, opened.handle_prefix))

    @answered
    async def Extend(self, request: pb.ExtendRequest, context: Context) -> pb.ExtendResponse:
        session, opened = self._opened(context, request.pool_id)
        pool, number = opened.served.pool, session.number

        def extend(item: pb.ExtendItem) -> Steps[pb.ExtendResult]:
            sequence = self._number(opened, item.sequence_id)
            try:
                added: Extension = yield from pool.extend(number, sequence, item.capacity_tokens)
            except PoolError as refused:
                status = item_status(_with_handle(refused, opened))
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

    @answered
    async def Commit(self, request: pb.CommitRequest, context: Context) -> pb.CommitResponse:
        session, opened = self._opened(context, request.pool_id)
        pool, number = opened.served.pool, session.number

        def commit(item: pb.CommitItem) -> Steps[pb.CommitResult]:
            sequence = self._number(opened, item.sequence_id)
            committed: Committed = yield from pool.commit(number, sequence, commit_of(item))
            return (yield from _commit_result(committed))

        results = await self._each(opened, request.items, commit, lambda status: pb.CommitResult(status=status))
        return pb.CommitResponse(results=results)

    @answered
    async def Fork(self, request: pb.ForkRequest, context: Context) -> pb.ForkResponse:
        session, opened = self._opened(context, request.pool_id)
        sequence = self._number(opened, request.sequence_id)
        served = opened.served

        children = await served.owner.fork(
            opened.turns,
            lambda: _named(
                opened,
                served.pool.fork(
                    session.number,
                    sequence,
                    request.child_count,
                    reserve_tokens=request.reserve_tokens,
                    request_id=request.request_id,
                    group=request.group,
                ),
            ),
            served.copy,
        )
        return pb.ForkResponse(children=[sequence_message(child, opened.handle_prefix) for child in children])

    @answered
    async def Handoff(self, request: pb.HandoffRequest, context: Context) -> pb.HandoffResponse:
        session, opened = self._opened(context, request.pool_id)
        sequence = self._number(opened, request.commit.sequence_id)
        commit = commit_of(request.commit)
        owner, token, ttl_s = opened.served.owner, secrets.token_urlsafe(24), self._handoff_ttl_s

        def start() -> Steps[None]:
            expires_at = owner.clock() + ttl_s
            return owner.pool.handoff(session.number, sequence, commit, token=token, expires_at=expires_at)

        await owner.run(opened.turns, lambda: _named(opened, start()))
        owner.reschedule()
        return pb.HandoffResponse(handoff_token=token, expire_time=expire_time(ttl_s), ttl=duration_message(ttl_s))

    @answered
    async def Adopt(self, request: pb.AdoptRequest, context: Context) -> pb.AdoptResponse:
        session, opened = self._opened(context, request.pool_id)
        pool = opened.served.pool

        def adopt() -> Steps[SequenceView]:
            yield from ()
            return pool.adopt(session.number, request.handoff_token, request_id=request.request_id, group=request.group)

        view = await opened.served.owner.run(opened.turns, adopt)
        return pb.AdoptResponse(sequence=sequence_message(view, opened.handle_prefix))

    @answered
    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        session, opened = self._opened(context, request.pool_id)
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

    def _opened(self, context: Context, pool_id: str) -> tuple[Session, OpenedPool]:
        session = self._callers.session(context)
        opened = session.opened.get(pool_id)
        if opened is None:
            raise self._pools.unknown(pool_id)
        return session, opened

    def _number(self, opened: OpenedPool, sequence_id: str) -> int:
        """Returns the number in a handle of this session and pool.

        Another session's handle is as unknown as one that never was, and every number has one spelling [S7].
        """
        number = sequence_id.removeprefix(opened.handle_prefix)
        if len(number) < len(sequence_id) and number.isascii() and number.isdigit() and len(number) <= 18:
            if number[0] != "0":
                return int(number)
        elif isinstance(stale := self._pools.unknown(".".join(sequence_id[:80].split(".")[:2])), StaleEpoch):
            raise stale
        raise SequenceNotFound(sequence_id=sequence_id[:80])

    async def _each(
        self,
        opened: OpenedPool,
        items: Sequence[Item],
        operate: Callable[[Item], Steps[Result]],
        refusal: Callable[[types_pb2.ItemStatus], Result],
    ) -> list[Result]:
        """Runs a batch in one turn of the session; an item that is refused fails alone."""
        validate.listed("items", len(items), MAX_ITEMS)

        def steps() -> Steps[list[Result]]:
            results: list[Result] = []
            for position, item in enumerate(items, start=1):
                try:
                    results.append((yield from operate(item)))
                except InvariantViolation:
                    raise
                except PoolError as refused:
                    results.append(refusal(item_status(_with_handle(refused, opened))))
                except ServerError as refused:
                    results.append(refusal(item_status(refused)))
                if not position % _ITEMS_A_SLICE:
                    yield
            return results

        return await opened.served.owner.run(opened.turns, steps)


def expire_time(ttl_s: float) -> timestamp_pb2.Timestamp:
    """Returns now and `ttl_s` by the wall clock, for people: the monotonic clock decides."""
    stamp = timestamp_pb2.Timestamp()
    stamp.FromNanoseconds(time.time_ns() + round(ttl_s * 1e9))
    return stamp


def _named(opened: OpenedPool, steps: Steps[T]) -> Steps[T]:
    try:
        return (yield from steps)
    except InvariantViolation:
        raise
    except PoolError as refused:
        raise _with_handle(refused, opened) from None


def _with_handle(refused: PoolError, opened: OpenedPool) -> PoolError:
    """Returns the refusal with the caller's handle: the pool knows a sequence as "session.number"."""
    own = refused.attributes.get("sequence_id")
    if own is None or not re.fullmatch(r"[0-9]+\.[0-9]+", str(own)):
        return refused
    return type(refused)(**{**refused.attributes, "sequence_id": f"{opened.served.pool_id}.{own}"})


def _commit_result(committed: Committed) -> Steps[pb.CommitResult]:
    result = pb.CommitResult(status=types_pb2.ItemStatus(), committed_tokens=committed.committed_tokens)
    for start in range(0, len(committed.shadows), _SHADOWS_A_SLICE):
        if start:
            yield
        result.shadows.extend(_shadow(each) for each in committed.shadows[start : start + _SHADOWS_A_SLICE])
    return result


def _shadow(shadow: Shadow) -> pb.Shadow:
    return pb.Shadow(position=shadow.position, block_id=shadow.block_id, generation=shadow.generation)
