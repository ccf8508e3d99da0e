"""DropPool and what the session that asks for it has there itself: blocks, calls under way, calls behind it."""

import asyncio
from array import array
from pathlib import Path
from typing import Any

import pytest

from kvharbor.pool import BlockRun, Chain, Prompt
from kvharbor.pool.steps import finish
from kvharbor.server.calls import block_operations
from kvharbor.server.errors import PoolInUse, PoolNotFound
from kvharbor.server.pools.served_pool import OpenedPool
from kvharbor.server.sessions.peer import Peer
from kvharbor.server.sessions.session import Session
from raw_caller import tokens
from raw_stream import block_tokens, leasing
from sessions_here import TENANT, SessionsHere, run, sessions_here

BLOCKS = 1500
"""Are handed out in three slices."""
NONE = BlockRun(array("I"), array("Q"))


async def opened_by(here: SessionsHere, number: int = 1) -> tuple[Session, OpenedPool]:
    """Returns a session that has the pool open."""
    session = Session(number, "token", Peer(1, 1, TENANT, administrator=False), "test", "0")
    return session, await here.opened(session)


def lease(session: Session, opened: OpenedPool, block_count: int) -> Any:
    """Leases, as a stream does."""
    return block_operations.lease(session, opened, leasing(opened.served.pool_id, block_count))


@pytest.mark.parametrize("is_committed", [False, True])
def test_blocks_that_the_session_holds_by_itself_keep_the_pool(tmp_path: Path, is_committed: bool) -> None:
    """Leased ones, which may be being written, and committed ones, which may be being read."""

    async def scenario() -> None:
        async with sessions_here(tmp_path) as here:
            session, opened = await opened_by(here)
            pool, pool_id = opened.served.pool, opened.served.pool_id
            held = finish(pool.lease(1, 2, 2))
            if is_committed:
                finish(pool.commit_blocks(1, NONE, held, Chain(token_ids=block_tokens(1, 2))))
            with pytest.raises(PoolInUse) as refused:
                await here.pools.drop(session, pool_id)
            assert refused.value.metadata()["blockCount"] == "2"
            finish(pool.release_blocks(1, held))
            assert await here.pools.drop(session, pool_id)
            assert here.pools.all() == []

    run(scenario())


def test_pins_are_named_as_far_as_the_caller_may_see_them(tmp_path: Path) -> None:
    """The rest are counted. An administrator sees all, and of many the first eight are named."""

    async def scenario() -> None:
        async with sessions_here(tmp_path, block_count=64) as here:
            session, opened = await opened_by(here)
            pool, pool_id = opened.served.pool, opened.served.pool_id
            pool.open_session(9, "u")
            finish(pool.warmup("u", 9, Prompt(tokens(*range(16))), "theirs", expires_at=None))
            finish(pool.warmup(TENANT, 1, Prompt(tokens(*range(16))), "ours", expires_at=None))
            assert await names_told(here, session, pool_id) == "'ours' and 1 more"
            administrator = Session(2, "token", Peer(1, 0, "root", administrator=True), "test", "0")
            assert await names_told(here, administrator, pool_id) == "'theirs', 'ours'"
            for number in range(9):
                finish(pool.warmup(TENANT, 1, Prompt(tokens(*range(16))), f"{number}", expires_at=None))
            first = ", ".join(f"'{number}'" for number in range(7))
            assert await names_told(here, session, pool_id) == f"'ours', {first} and 3 more"

    run(scenario())


async def names_told(here: SessionsHere, session: Session, pool_id: str) -> str:
    """Returns the pins that the refusal to drop a pool names."""
    with pytest.raises(PoolInUse) as refused:
        await here.pools.drop(session, pool_id)
    return refused.value.metadata()["pinNames"]


def test_what_the_session_is_being_given_keeps_the_pool(tmp_path: Path) -> None:
    """S3: the drop comes after the session's calls that came before it."""

    async def scenario() -> None:
        async with sessions_here(tmp_path, block_count=BLOCKS) as here:
            session, opened = await opened_by(here)
            leasing = asyncio.create_task(lease(session, opened, BLOCKS))
            await asyncio.sleep(0)
            with pytest.raises(PoolInUse):
                await here.pools.drop(session, opened.served.pool_id)
            assert (await leasing).response.leased.block_ids
            assert here.pools.all() == [opened.served]

    run(scenario())


def test_who_opens_it_meanwhile_keeps_the_pool(tmp_path: Path) -> None:
    """While the drop waits for its turn."""

    async def scenario() -> None:
        async with sessions_here(tmp_path, block_count=BLOCKS) as here:
            session, opened = await opened_by(here)
            await opened.turns.take()
            dropping = asyncio.create_task(here.pools.drop(session, opened.served.pool_id))
            await asyncio.sleep(0)
            await opened_by(here, 2)
            opened.turns.leave()
            with pytest.raises(PoolInUse) as refused:
                await dropping
            assert refused.value.session_count == 1

    run(scenario())


def test_calls_behind_a_drop_find_no_pool(tmp_path: Path) -> None:
    """Not memory that is gone already, which would be the end of the process; a second drop finds none either."""

    async def scenario() -> None:
        async with sessions_here(tmp_path, block_count=BLOCKS) as here:
            session, opened = await opened_by(here)
            pool_id = opened.served.pool_id
            await opened.turns.take()
            dropping = asyncio.create_task(here.pools.drop(session, pool_id))
            await asyncio.sleep(0)
            leasing = [asyncio.create_task(lease(session, opened, 1)) for _ in range(200)]
            again = asyncio.create_task(here.pools.drop(session, pool_id))
            await asyncio.sleep(0)
            opened.turns.leave()
            assert await dropping
            assert not await again
            outcomes = await asyncio.gather(*leasing, return_exceptions=True)
            assert {type(one) for one in outcomes} == {PoolNotFound}
            assert here.pools.all() == []

    run(scenario())
