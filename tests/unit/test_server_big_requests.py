"""A request of 2^20 tokens is cut in slices, whatever it asks for: others are served between any two.

Counted, not timed: each turn of the event loop serves one small request and goes one slice on with the big one.
"""

import asyncio
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from kvharbor.pool import POLICIES, Commit, Pool, PoolConfig, Prompt
from kvharbor.pool.steps import Steps, finish
from kvharbor.server.scheduling.event_log import EventLog
from kvharbor.server.scheduling.owner import PoolOwner, offset_clock
from kvharbor.server.scheduling.turns import Turns

pytestmark = pytest.mark.slow

TOKENS, BLOCK_TOKENS = 1 << 20, 16
SLICES = TOKENS // BLOCK_TOKENS // PoolConfig(1, 1).slice_blocks
BIG, OTHER = (Prompt(array("I", range(first, first + TOKENS)).tobytes()) for first in (0, TOKENS))
SMALL = Prompt(array("I", range(8)).tobytes())
DEADLINE_S = 60.0
Operation = Callable[[Pool], Steps[Any]]


def crash(failure: BaseException) -> None:
    """Fails the test."""
    raise failure


def new_pool(policy: str) -> Pool:
    """Returns a pool with room for one big prompt and some small ones, as the service makes its pools."""
    config = PoolConfig(70_000, BLOCK_TOKENS, policy=policy, history=True, warm_budget_ratio=1.0)
    pool = Pool(config)
    for session in (1, 2, 3):
        pool.open_session(session, "t")
    return pool


def held(pool: Pool) -> int:
    """Allocates the big prompt for session 1; returns its number."""
    return finish(pool.allocate(1, BIG)).number


def written(pool: Pool) -> int:
    """Commits it too."""
    number = held(pool)
    finish(pool.commit(1, number, Commit(TOKENS)))
    return number


def cached(pool: Pool) -> None:
    """Leaves it to nobody."""
    finish(pool.release(1, written(pool)))


def allocating_cold(pool: Pool) -> Steps[Any]:
    return pool.allocate(1, BIG)


def allocating_what_is_there(pool: Pool) -> Steps[Any]:
    cached(pool)
    return pool.allocate(1, BIG, max_cached_tokens=TOKENS)


def allocating_where_all_must_be_evicted(pool: Pool) -> Steps[Any]:
    cached(pool)
    return pool.allocate(1, OTHER)


def committing(pool: Pool) -> Steps[Any]:
    return pool.commit(1, held(pool), Commit(TOKENS))


def releasing(pool: Pool) -> Steps[Any]:
    return pool.release(1, written(pool))


def releasing_what_is_not_written(pool: Pool) -> Steps[Any]:
    return pool.release(1, held(pool))


def looking_up(pool: Pool) -> Steps[Any]:
    cached(pool)
    return pool.lookup("t", BIG)


def pinning(pool: Pool) -> Steps[Any]:
    cached(pool)
    return pool.warmup("t", 1, BIG, "w")


def unpinning(pool: Pool) -> Steps[Any]:
    cached(pool)
    finish(pool.warmup("t", 1, BIG, "w"))
    return pool.unwarm("t", "w")


def removing(pool: Pool) -> Steps[Any]:
    cached(pool)
    return pool.evict_unheld()


def ending_the_session(pool: Pool) -> Steps[Any]:
    written(pool)
    finish(pool.end_session(1))
    return pool.session_quiet(1)


OPERATIONS: list[Operation] = [
    allocating_cold,
    allocating_what_is_there,
    allocating_where_all_must_be_evicted,
    committing,
    releasing,
    releasing_what_is_not_written,
    looking_up,
    pinning,
    unpinning,
    removing,
    ending_the_session,
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_a_small_request_is_served_between_any_two_slices(operation: Operation, policy: str) -> None:
    """L3: Allocates of 8 tokens, each with its Release, meanwhile: as many as there are slices, about."""

    async def scenario() -> int:
        pool = new_pool(policy)
        steps = operation(pool)
        owner = PoolOwner(pool, EventLog(1 << 24), offset_clock(1e6), crash)
        big = asyncio.create_task(owner.run(Turns(), lambda: steps))
        await asyncio.sleep(0)
        turns, served = Turns(), 0
        while not big.done():
            await owner.run(turns, lambda: pool.allocate(2, SMALL, request_id="r"))
            await owner.run(turns, lambda: pool.release_request(2, "r"))
            served += 1
            await asyncio.sleep(0)
        await big
        await owner.close()
        pool.check_invariants()
        return served

    async def limited() -> int:
        return await asyncio.wait_for(scenario(), DEADLINE_S)

    assert asyncio.run(limited()) >= SLICES - 2
