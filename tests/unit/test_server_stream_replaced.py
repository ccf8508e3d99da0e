"""A stream that takes another one's place: what is taken back for the old one comes before what the new one asks."""

import asyncio
import contextlib
from array import array
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvharbor.pool import BlockRun, Chain
from kvharbor.pool.steps import finish
from kvharbor.server.calls.gate import Gate
from kvharbor.server.calls.sequence_operations import SequenceOperations
from kvharbor.server.pools.served_pool import OpenedPool
from kvharbor.server.sessions.peer import Peer
from kvharbor.server.sessions.session import Session
from kvharbor.server.stream.stream_calls import StreamCalls
from kvharbor.v1 import blocks_pb2
from kvharbor.v1 import stream_service_pb2 as pb
from raw_stream import block_tokens, chain, count, first, leasing
from scenarios import settled
from sessions_here import TENANT, SessionsHere, run, sessions_here

CACHED = 1500
"""Blocks that are held in three slices."""


class Callers:
    """Knows one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def session(self, _context: Any) -> Session:
        """Returns it."""
        return self._session


class Transport:
    """gRPC's side of one stream, which takes each response at once."""

    def __init__(self, *requests: pb.ConverseRequest) -> None:
        self.requests: asyncio.Queue[Any] = asyncio.Queue()
        for request in requests:
            self.requests.put_nowait(request)
        self.taken: list[pb.ConverseResponse] = []
        self.code: grpc.StatusCode | None = None

    def set_trailing_metadata(self, _metadata: Any) -> None:
        pass

    async def send_initial_metadata(self, _metadata: Any) -> None:
        pass

    async def read(self) -> Any:
        return await self.requests.get()

    async def write(self, message: pb.ConverseResponse) -> None:
        self.taken.append(message)

    async def abort(self, code: grpc.StatusCode, _details: str, _metadata: Any = ()) -> None:
        self.code = code
        raise grpc.aio.AbortError


class Bench:
    """A session and its streams, on a pool with a chain of blocks that nobody holds."""

    def __init__(self, here: SessionsHere, session: Session, opened: OpenedPool) -> None:
        gate = Gate(here.life.epoch)
        gate.open()
        sequences = SequenceOperations(here.pools, handoff_ttl_s=30.0)
        self.calls = StreamCalls(gate, Callers(session), here.pools, sequences)  # type: ignore[arg-type]
        self.opened, self.pool, self.pool_id = opened, opened.served.pool, opened.served.pool_id
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def of(cls, here: SessionsHere) -> "Bench":
        """Makes it."""
        session = Session(1, "token", Peer(1, 1, TENANT, administrator=False), "test", "0")
        opened = await here.opened(session)
        pool = opened.served.pool
        leased = finish(pool.lease(1, CACHED, CACHED))
        finish(
            pool.commit_blocks(
                1, BlockRun(array("I"), array("Q")), leased, Chain(token_ids=block_tokens(*range(CACHED)))
            )
        )
        finish(pool.release_blocks(1, leased))
        assert pool.holding(1).held_block_count == 0
        return cls(here, session, opened)

    def converse(self, *requests: pb.ConverseRequest) -> Transport:
        """Opens another stream of the session, which sends these requests at once."""
        transport = Transport(*requests)
        self._tasks.append(asyncio.create_task(self._conversing(transport)))
        return transport

    async def _conversing(self, transport: Transport) -> None:
        with contextlib.suppress(grpc.aio.AbortError):
            await self.calls.Converse(None, transport)  # type: ignore[arg-type]

    def acquire(self, number: int, table_block_count: int = 0, **fields: Any) -> pb.ConverseRequest:
        """Returns the request for the chain."""
        asked = chain(*range(CACHED), table_block_count=table_block_count)
        request = blocks_pb2.AcquireRequest(pool_id=self.pool_id, chains=[asked], **fields)
        return pb.ConverseRequest(number=number, acquire=request)

    async def close(self) -> None:
        """Gives the streams up."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def test_what_the_new_stream_is_told_stays_held(tmp_path: Path) -> None:
    """S22, S33: the old one's Acquire is under way when the new one asks for the same blocks."""

    async def scenario() -> None:
        async with sessions_here(tmp_path, block_count=2 * CACHED) as here:
            bench = await Bench.of(here)
            old = bench.converse(bench.acquire(1))
            while not bench.pool.stats().active_block_count:
                await asyncio.sleep(0)
            new = bench.converse(bench.acquire(1))
            await settled()
            assert (old.code, len(old.taken)) == (grpc.StatusCode.CANCELLED, 0)
            (response,) = new.taken
            assert count(response.acquire.results[0].held) == CACHED
            assert bench.pool.holding(1).held_block_count == CACHED
            await bench.close()

    run(scenario())


@pytest.mark.parametrize("turns_later", range(12))
def test_so_it_does_when_the_old_one_is_just_being_granted_them(tmp_path: Path, turns_later: int) -> None:
    """What waits is tried in slices too: its end belongs to the old stream, whenever the new one comes."""

    async def scenario() -> None:
        async with sessions_here(tmp_path, block_count=2 * CACHED) as here:
            bench = await Bench.of(here)
            room = finish(bench.pool.lease(1, CACHED, CACHED))
            wait = {"seconds": 20}
            old = bench.converse(bench.acquire(1, CACHED + 1, wait=wait))
            await settled()
            assert old.taken[0].acquire.results[0].waiting
            releasing = asyncio.create_task(
                bench.opened.served.owner.run(bench.opened.turns, lambda: bench.pool.release_blocks(1, room))
            )
            for _ in range(turns_later):
                await asyncio.sleep(0)
            new = bench.converse(bench.acquire(1))
            await releasing
            await settled()
            assert old.code == grpc.StatusCode.CANCELLED
            (response,) = new.taken
            assert count(response.acquire.results[0].held) == CACHED
            assert bench.pool.holding(1).held_block_count == CACHED
            if len(old.taken) == 1:
                assert bench.pool.holding(1).leased_block_count == 0
            await bench.close()

    run(scenario())


def test_a_third_stream_waits_for_the_end_of_both(tmp_path: Path) -> None:
    """Each waits for the one before, so their order is that of their begins."""

    async def scenario() -> None:
        async with sessions_here(tmp_path, block_count=2 * CACHED) as here:
            bench = await Bench.of(here)
            streams = [bench.converse(bench.acquire(1)) for _ in range(5)]
            await settled()
            assert [one.code for one in streams[:-1]] == [grpc.StatusCode.CANCELLED] * 4
            assert streams[-1].code is None
            (response,) = streams[-1].taken
            assert count(response.acquire.results[0].held) == CACHED
            assert bench.pool.holding(1).held_block_count == CACHED
            leased = pb.ConverseRequest(number=2, lease=leasing(bench.pool_id, 3))
            streams[-1].requests.put_nowait(leased)
            await settled()
            assert bench.pool.holding(1).leased_block_count == 3
            await bench.close()

    run(scenario())


@pytest.mark.parametrize("turns_later", range(3))
def test_what_an_invalidate_takes_back_is_nobodys_when_its_stream_is_replaced(tmp_path: Path, turns_later: int) -> None:
    """S22: its caller is not told in which generation the blocks are his now."""

    async def scenario() -> None:
        async with sessions_here(tmp_path, block_count=2 * CACHED) as here:
            bench = await Bench.of(here)
            old = bench.converse(bench.acquire(1))
            await settled()
            held = old.taken[0].acquire.results[0].held
            request = blocks_pb2.InvalidateBlocksRequest(pool_id=bench.pool_id, blocks=first(held))
            old.requests.put_nowait(pb.ConverseRequest(number=2, invalidate_blocks=request))
            while not bench.pool.stats().reserved_block_count:
                await asyncio.sleep(0)
            for _ in range(turns_later):
                await asyncio.sleep(0)
            bench.converse()
            await settled()
            holding = bench.pool.holding(1)
            assert holding.held_block_count == 0
            assert holding.leased_block_count == (CACHED if len(old.taken) == 2 else 0)
            await bench.close()

    run(scenario())
