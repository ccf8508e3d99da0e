"""Calls that are given up while their session ends: what they have made ends with it, and the process goes on."""

import asyncio
import contextlib
from array import array
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kvharbor.server.calls import block_operations
from kvharbor.server.calls.sequence_operations import SequenceOperations
from kvharbor.server.errors import ServerError
from kvharbor.server.pools import recorder, session_end
from kvharbor.server.pools.served_pool import OpenedPool
from kvharbor.server.session_errors import SessionUnknown
from kvharbor.server.sessions.peer import Peer
from kvharbor.server.sessions.session import Session, State
from kvharbor.v1 import blocks_pb2
from kvharbor.v1 import cache_service_pb2 as cache
from raw_stream import chain, leasing
from scenarios import settled
from sessions_here import TENANT, SessionsHere, run, sessions_here

BLOCKS = 1500
"""Are handed out in three slices."""

Call = Callable[[SessionsHere, Session, OpenedPool], Awaitable[object]]


def _long_prompt() -> bytes:
    return array("I", range(16 * BLOCKS)).tobytes()


def _allocate(here: SessionsHere, session: Session, opened: OpenedPool) -> Awaitable[object]:
    request = cache.AllocateRequest(pool_id=opened.served.pool_id, token_ids=_long_prompt())
    return SequenceOperations(here.pools, handoff_ttl_s=30.0).allocate(session, opened, request)


def _acquire(_here: SessionsHere, session: Session, opened: OpenedPool) -> Awaitable[object]:
    request = blocks_pb2.AcquireRequest(chains=[chain(1, table_block_count=BLOCKS)])
    return block_operations.acquire(session, opened, request)


def _lease(_here: SessionsHere, session: Session, opened: OpenedPool) -> Awaitable[object]:
    return block_operations.lease(session, opened, leasing(opened.served.pool_id, BLOCKS))


async def _gone(*_: object) -> None:
    """Every process of the session is gone."""


@pytest.mark.parametrize("call", [_allocate, _acquire, _lease])
@pytest.mark.parametrize("later", range(5))
def test_a_call_that_is_given_up_behind_the_end_of_its_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call, later: int
) -> None:
    """As when its process is killed in it: the end of the socket may be noticed before that of the call."""

    async def scenario() -> None:
        async with sessions_here(tmp_path, block_count=BLOCKS) as here:
            session = Session(1, "token", Peer(1, 1, TENANT, administrator=False), "test", "0")
            opened = await here.opened(session)
            monkeypatch.setattr(session_end, "until_gone", _gone)
            crashes: list[BaseException] = []
            monkeypatch.setattr(opened.served.owner, "_crash", crashes.append)
            task = asyncio.ensure_future(call(here, session, opened))
            await asyncio.sleep(0)
            session.state = State.ENDING
            ending = asyncio.create_task(session_end.end_in_pool(session, opened))
            for _ in range(later):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, ServerError):
                await task
            await ending
            await settled()
            assert crashes == []
            assert here.stats().free_block_count == BLOCKS

    run(scenario())


def test_a_session_that_ends_while_its_prompt_is_named_gets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody records, and names are made in slices, before the call has its turn."""

    async def scenario() -> None:
        async with sessions_here(tmp_path, block_count=BLOCKS) as here:
            session = Session(1, "token", Peer(1, 1, TENANT, administrator=False), "test", "0")
            opened = await here.opened(session)
            monkeypatch.setattr(session_end, "until_gone", _gone)
            crashes: list[BaseException] = []
            monkeypatch.setattr(opened.served.owner, "_crash", crashes.append)
            monkeypatch.setattr(recorder, "_SLICE_BLOCKS", 512)
            with opened.served.recorder.recording():
                task = asyncio.ensure_future(_allocate(here, session, opened))
                await asyncio.sleep(0)
                session.state = State.ENDING
                await session_end.end_in_pool(session, opened)
                with pytest.raises(SessionUnknown):
                    await task
            assert crashes == []

    run(scenario())
