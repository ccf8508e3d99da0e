"""What block calls do: message to value, value to message. They come on streams only."""

# Or the annotations of inner functions are evaluated in every call.
from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kvharbor.pool import Acquired, BlockRun, Chain, Invalidated, Shadow, validate
from kvharbor.pool.digest import OPAQUE_KEY_BYTES
from kvharbor.pool.errors import InvalidField, PoolExhausted
from kvharbor.pool.steps import Steps
from kvharbor.server.calls.batches import MAX_ITEMS, each
from kvharbor.server.calls.withdrawal import BlockWithdrawal
from kvharbor.server.messages.blocks import acquired_message, chain_of, committed_message, leased_message
from kvharbor.server.messages.wire import block_run_of, seconds_of, table_message
from kvharbor.server.pools.recorder import Arrival
from kvharbor.server.pools.served_pool import OpenedPool
from kvharbor.server.scheduling.applications import Application, Waiter
from kvharbor.server.scheduling.want_of_room import shortage
from kvharbor.server.session_errors import SessionUnknown
from kvharbor.server.sessions.session import Session
from kvharbor.v1 import blocks_pb2 as pb
from kvharbor.v1 import types_pb2

G = TypeVar("G", Acquired, BlockRun)
R = TypeVar("R", pb.AcquireResponse, pb.LeaseResponse, pb.InvalidateBlocksResponse)


@dataclass(frozen=True, slots=True, eq=False)
class Waiting(Generic[G]):
    """A request that waits for room, and its outcome as a message."""

    waiter: Waiter[G]
    chain_index: int
    message: Callable[[G], pb.AcquireResult]


@dataclass(frozen=True, slots=True, eq=False)
class Leased(Generic[R, G]):
    """An answer that gives blocks. `undo` is for one that does not leave; whoever gets it sees to the `waiting`."""

    response: R
    undo: Callable[[], None] | None = None
    waiting: Waiting[G] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Blocked:
    """The first chain of an Acquire that does not fit; `needed_blocks` must be available for another try."""

    index: int
    application: Application[Acquired]
    refused: PoolExhausted
    needed_blocks: int


async def acquire(
    session: Session, opened: OpenedPool, request: pb.AcquireRequest
) -> Leased[pb.AcquireResponse, Acquired]:
    """Holds what is there of prompts and leases the rest, in order; after one that does not fit none is tried.

    That one may wait.
    """
    wait_s = seconds_of("wait", request.wait) if request.HasField("wait") else 0.0
    validate.listed("chains", len(request.chains), MAX_ITEMS)
    served, number = opened.served, session.number
    pool, admission, recorder = served.pool, served.admission, served.recorder
    block_count = sum(_block_count(chain, pool.config.block_tokens) for chain in request.chains)
    validate.table("chains", len(request.chains), block_count, "send them in several requests")
    blocked: _Blocked | None = None
    withdrawal = BlockWithdrawal(session, opened)
    arrivals = await _arrivals(opened, request.chains, session.peer.tenant) if recorder.is_on else {}
    if session.ended:
        raise SessionUnknown(session.cause)

    def application(index: int, message: pb.BlockChain) -> Application[Acquired]:
        chain, table_block_count = chain_of(message, opened.version), message.table_block_count
        computes, uses, unless_pending = message.computes, message.uses, message.unless_pending
        arrival = arrivals.get(index)

        def start() -> Steps[Acquired]:
            acquired: Acquired = yield from pool.acquire(
                number, chain, table_block_count, computes=computes, uses=uses, unless_pending=unless_pending
            )
            if arrival is not None and not acquired.stands_back:
                recorder.acquired(arrival, number, acquired)
            return acquired

        return Application(
            session,
            session.peer.tenant,
            opened.turns,
            start,
            max(table_block_count, 0),
            give_back=lambda acquired: _give_back(session, opened, acquired.added, acquired.leased),
        )

    def one(item: tuple[int, pb.BlockChain]) -> Steps[pb.AcquireResult]:
        nonlocal blocked
        index, message = item
        asked = application(index, message)
        if blocked is not None:
            raise _behind(blocked.refused, asked.block_count)
        needed_blocks = 0
        try:
            admission.require_passage(asked)
            try:
                acquired: Acquired = yield from asked.start()
                withdrawal.note(acquired.added, acquired.leased)
            except PoolExhausted as refused:
                needed_blocks = shortage(pool, refused)
                raise
        except PoolExhausted as refused:
            blocked = _Blocked(index, asked, refused, needed_blocks)
            raise
        return acquired_message(acquired)

    with withdrawal:
        results = await served.owner.run(
            opened.turns,
            lambda: each(
                opened, "chains", list(enumerate(request.chains)), one, lambda status: pb.AcquireResult(status=status)
            ),
        )
    waiting = None
    if blocked is not None and wait_s > 0 and not session.ended:
        results[blocked.index].waiting = True
        waiter = admission.join(blocked.application, blocked.refused, blocked.needed_blocks, wait_s)
        waiting = Waiting(waiter, blocked.index, acquired_message)
    elif blocked is not None:
        admission.lacks_room(session, blocked.refused)
    return Leased(pb.AcquireResponse(results=results), withdrawal.withdraw, waiting)


async def lease(session: Session, opened: OpenedPool, request: pb.LeaseRequest) -> Leased[pb.LeaseResponse, BlockRun]:
    """Leases blocks. Those for growth go before all who wait; while others wait nobody gets more than he needs."""
    least, want = request.least_block_count, request.want_block_count
    _check_lease(least, want)
    wait_s = seconds_of("wait", request.wait) if request.HasField("wait") and not request.growth else 0.0
    served, number = opened.served, session.number
    pool, admission = served.pool, served.admission
    withdrawal = BlockWithdrawal(session, opened)
    waiter: Waiter[BlockRun] | None = None

    def start() -> Steps[BlockRun]:
        do_others_wait = admission.waiting_count > (waiter is not None)
        leased: BlockRun = yield from pool.lease(number, least, max(least, 1) if do_others_wait else want)
        withdrawal.note(leased)
        return leased

    application = Application(
        session,
        session.peer.tenant,
        opened.turns,
        start,
        least,
        give_back=lambda leased: _give_back(session, opened, leased),
    )
    needed_blocks = least
    try:
        if not request.growth:
            admission.require_passage(application)
        try:
            with withdrawal:
                leased = await served.owner.run(opened.turns, start)
        except PoolExhausted as refused:
            needed_blocks = shortage(pool, refused)
            raise
    except PoolExhausted as refused:
        if not least:
            return Leased(pb.LeaseResponse())
        if wait_s <= 0 or session.ended:
            admission.lacks_room(session, refused)
            raise
        waiter = admission.join(application, refused, needed_blocks, wait_s)
        return Leased(pb.LeaseResponse(waiting=True), waiting=Waiting(waiter, 0, leased_message))
    return Leased(pb.LeaseResponse(leased=table_message(leased)), withdrawal.withdraw)


async def commit_blocks(
    session: Session, opened: OpenedPool, request: pb.CommitBlocksRequest
) -> pb.CommitBlocksResponse:
    """Publishes leased blocks, chain by chain."""
    pool, number = opened.served.pool, session.number

    def commit(item: pb.CommitChain) -> Steps[pb.CommitChainResult]:
        parent, blocks = block_run_of("parent", item.parent), block_run_of("blocks", item.blocks)
        chain: Chain = chain_of(item, opened.version)
        shadows: tuple[Shadow, ...] = yield from pool.commit_blocks(number, parent, blocks, chain)
        return (yield from committed_message(shadows))

    results = await opened.served.owner.run(
        opened.turns,
        lambda: each(opened, "chains", request.chains, commit, lambda status: pb.CommitChainResult(status=status)),
    )
    return pb.CommitBlocksResponse(results=results)


async def release_blocks(
    session: Session, opened: OpenedPool, request: pb.ReleaseBlocksRequest
) -> pb.ReleaseBlocksResponse:
    """Ends holds."""
    pool, number, recorder = opened.served.pool, session.number, opened.served.recorder
    blocks = block_run_of("blocks", request.blocks)
    count = await opened.served.owner.run(opened.turns, lambda: pool.release_blocks(number, blocks))
    recorder.released(number, blocks)
    return pb.ReleaseBlocksResponse(released_block_count=count)


async def invalidate_blocks(
    session: Session, opened: OpenedPool, request: pb.InvalidateBlocksRequest
) -> Leased[pb.InvalidateBlocksResponse, BlockRun]:
    """Takes back what was published, block by block."""
    pool, number = opened.served.pool, session.number
    blocks = block_run_of("blocks", request.blocks)
    validate.listed("blocks", len(blocks), MAX_ITEMS)
    done: list[Invalidated] = []
    withdrawal = BlockWithdrawal(session, opened)

    def invalidate(item: tuple[int, int]) -> Steps[types_pb2.ItemStatus]:
        done.append((yield from pool.invalidate(number, *item)))
        withdrawal.note(done[-1].leased)
        return types_pb2.ItemStatus()

    named = list(zip(blocks.block_ids, blocks.generations, strict=True))
    with withdrawal:
        statuses = await opened.served.owner.run(
            opened.turns, lambda: each(opened, "blocks", named, invalidate, lambda status: status)
        )
    response = pb.InvalidateBlocksResponse(
        statuses=statuses,
        leased=table_message(_joined(one.leased for one in done)),
        invalidated=table_message(_joined(one.before for one in done)),
    )
    return Leased(response, withdrawal.withdraw)


async def _arrivals(opened: OpenedPool, chains: Sequence[pb.BlockChain], tenant: str) -> dict[int, Arrival]:
    """Notes, for who records, the chains that are to be admitted; those without a table only look."""
    recorder, block_tokens = opened.served.recorder, opened.served.pool.config.block_tokens
    found: dict[int, Arrival] = {}
    for index, message in enumerate(chains):
        if message.table_block_count > 0:
            with contextlib.suppress(InvalidField):  # refused when its turn comes
                chain = chain_of(message, opened.version)
                validate.chain(chain, block_tokens)
                found[index] = await recorder.arrived(chain, tenant)
    return found


def _block_count(chain: pb.BlockChain, block_tokens: int) -> int:
    """Returns how many blocks an answer may have for a chain."""
    contents = len(chain.keys) // OPAQUE_KEY_BYTES + len(chain.token_ids) // (4 * block_tokens)
    return max(chain.table_block_count, contents)


def _give_back(session: Session, opened: OpenedPool, *taken: BlockRun) -> None:
    """Gives blocks back, in the session's next turn, that nobody is told of."""
    withdrawal = BlockWithdrawal(session, opened)
    withdrawal.note(*taken)
    withdrawal.withdraw()


def _check_lease(least: int, want: int) -> None:
    if least < 0:
        raise InvalidField(
            field="least_block_count", value=least, limit="0 or more", remedy="leave it 0 for what is there"
        )
    if want < max(least, 1):
        raise InvalidField(
            field="want_block_count",
            value=want,
            limit=f"{max(least, 1)} or more",
            remedy="ask for at least as many as are needed",
        )
    validate.table("want_block_count", want, want, "ask for less at a time")


def _behind(refused: PoolExhausted, block_count: int) -> PoolExhausted:
    """Returns the refusal of a chain that stands behind one that does not fit."""
    values: dict[str, Any] = {**refused.attributes, "needed_block_count": block_count}
    return PoolExhausted(**values)


def _joined(runs: Iterable[BlockRun]) -> BlockRun:
    block_ids, generations = array("I"), array("Q")
    for run in runs:
        block_ids += run.block_ids
        generations += run.generations
    return BlockRun(block_ids, generations)
