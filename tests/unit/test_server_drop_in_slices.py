"""A pool that is dropped is emptied in slices: others are served between any two, however much it has cached."""

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest

from kvharbor.pool import Commit, PoolConfig, Prompt
from kvharbor.pool.steps import finish
from kvharbor.server.sessions.peer import Peer
from kvharbor.server.sessions.session import Session
from raw_caller import BLOCK_TOKENS, tokens
from sessions_here import TENANT, run, sessions_here

pytestmark = pytest.mark.slow

BLOCK_COUNT = 16_384


def test_dropping_a_full_pool_lets_others_in(tmp_path: Path) -> None:
    """L3, S14: counted, not timed: the event loop has a turn after each slice."""

    async def scenario() -> None:
        async with sessions_here(tmp_path, block_count=BLOCK_COUNT) as here:
            session = Session(1, "token", Peer(1, 1, TENANT, administrator=False), "test", "0")
            opened = await here.opened(session)
            pool = opened.served.pool
            view = finish(pool.allocate(1, Prompt(tokens(*range(BLOCK_COUNT * BLOCK_TOKENS)))))
            finish(pool.commit(1, view.number, Commit(view.token_count)))
            finish(pool.release(1, view.number))
            assert pool.stats().cached_block_count == BLOCK_COUNT
            dropping = asyncio.create_task(here.pools.drop(session, opened.served.pool_id))
            cached = [BLOCK_COUNT]
            while not dropping.done():
                await asyncio.sleep(0)
                cached.append(pool.stats().cached_block_count)
            assert await dropping
            assert cached[-1] == 0
            steps = [before - after for before, after in pairwise(cached)]
            assert max(steps) <= 2 * PoolConfig(1, 1).slice_blocks
            assert here.pools.all() == []

    run(scenario())
