"""What a client does when the service is slow, gone or not there, and when its own caller gives up."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import StartService
from integration.client_kinds import Connect
from integration.client_worker import LAYOUT, pool_size
from kvharbor.client import (
    CursorOutOfRange,
    DeadlineExceeded,
    HarborClosed,
    InvalidField,
    MessageTooLarge,
    PoolExhausted,
    SequenceInDoubt,
    ServiceUnreachable,
    SessionLost,
    SessionRequired,
    aio,
)
from moments import hurried

pytestmark = pytest.mark.slow


def test_nobody_at_the_address_is_told_at_once_with_the_remedy(open_harbor: Connect, tmp_path: Path) -> None:
    """The message names the path and how to start a service there."""
    with pytest.raises(ServiceUnreachable, match="kvharbor serve"):
        open_harbor(str(tmp_path / "none.sock"))
    with pytest.raises(InvalidField):
        open_harbor("not a target")


def test_an_allocate_that_runs_out_of_time_leaves_nothing_held(open_harbor: Connect, start_fresh: StartService) -> None:
    """C4: the service finds the call and its undoing when it wakes, and the whole pool is there for the next."""
    service = start_fresh()
    pool = open_harbor(service.target).open_pool("p", LAYOUT, pool_size(8))
    with service.standing_still(), hurried(pool), pytest.raises(DeadlineExceeded):
        pool.allocate(range(128))
    other = open_harbor(service.target).open_pool("p", LAYOUT)
    with other.allocate(range(1000, 1128), wait_s=10):
        assert other.stats().sequence_count == 1


def test_a_commit_without_an_answer_is_carried_by_the_next(open_harbor: Connect, start_fresh: StartService) -> None:
    """C5: it has not moved token_count, and whatever became of it, its tokens are appended once."""
    service = start_fresh()
    pool = open_harbor(service.target).open_pool("p", LAYOUT, pool_size(8))
    held = pool.allocate(range(16), reserve_tokens=16)
    with service.standing_still(), hurried(pool), pytest.raises(DeadlineExceeded):
        held.commit(16, [1, 2, 3])
    assert held.token_count == 16
    with pytest.raises(SequenceInDoubt):
        held.fork(1)
    assert held.commit(18, [1, 2, 3, 4]).committed_tokens == 16
    assert (held.token_count, held.commit(20).committed_tokens) == (20, 16)
    with pytest.raises(CursorOutOfRange):
        held.commit(21)
    held.release()
    assert pool.stats().sequence_count == 0


def test_the_death_of_all_of_the_service_ends_the_session(open_harbor: Connect, start_fresh: StartService) -> None:
    """Calls say so and how to go on; releases and close are quiet, as there is nothing left to release."""
    service = start_fresh()
    harbor = open_harbor(service.target)
    pool = harbor.open_pool("p", LAYOUT, pool_size(8))
    held = pool.allocate(range(16))
    service.kill()
    for lost in (lambda: pool.allocate(range(3)), lambda: held.commit(16), pool.stats, harbor.server_info):
        with pytest.raises(SessionLost, match="connect again"):
            after_pending(lost)
    held.release()
    assert held.ended
    harbor.close()


def after_pending(commit: Callable[[], Any]) -> None:
    """Commits until it fails: for a moment nobody knows yet that nobody will come back."""
    while getattr(commit(), "pending", False):
        os.sched_yield()


def test_a_watch_ends_with_the_error_that_ended_it(open_harbor: Connect, start_fresh: StartService) -> None:
    """The death of the service, and the end of the harbor by another; a close of the watch itself is no error."""
    service = start_fresh()
    harbor = open_harbor(service.target)
    pool = harbor.open_pool("p", LAYOUT, pool_size(8))
    with pool.watch() as watch:
        events = iter(watch)
        next(events)
        watch.close()
        assert list(events) == []
    watch = pool.watch()
    events = iter(watch)
    next(events)
    service.kill()
    with pytest.raises((SessionLost, ServiceUnreachable)):
        list(events)


def test_a_message_that_is_too_large_is_the_callers_mistake(open_harbor: Connect, start_fresh: StartService) -> None:
    """Beyond gRPC's limit the service cannot even say that the pool is too small."""
    pool = open_harbor(start_fresh().target).open_pool("p", LAYOUT, pool_size(8))
    with pytest.raises(MessageTooLarge):
        pool.allocate(bytes(80 * 2**20))
    assert pool.stats().sequence_count == 0


def test_over_tcp_tools_work_and_workers_are_told_why_not(open_harbor: Connect, start_fresh: StartService) -> None:
    """Lookup, stats, watch and pins of what is there; blocks need a session, and a session the Unix socket."""
    service = start_fresh(listen="127.0.0.1:0", anonymous_tenant=f"uid-{os.getuid()}")
    pool = open_harbor(service.target).open_pool("p", LAYOUT, pool_size(8))
    with pool.allocate(range(16)) as held:
        held.commit(16)
    tool = open_harbor(service.wait_for("ready")["listen"])
    assert (tool.session_id, tool.tenant, tool.epoch) == ("", "", "")
    assert tool.server_info().epoch
    handle = tool.find_pool("p")
    assert handle.lookup(range(16)).present_tokens == 16
    assert handle.stats().cached_block_count == 1
    with handle.watch() as watch:
        assert next(iter(watch)).revision
    with pytest.raises(SessionRequired, match="Unix socket"):
        tool.open_pool("p", LAYOUT)


def test_cancelling_an_allocate_takes_it_out_of_the_queue(start_fresh: StartService) -> None:
    """C4 for asyncio: a cancelled task leaves no waiting call and no held block."""

    async def body() -> None:
        async with await aio.connect(start_fresh().target) as harbor:
            pool = await harbor.open_pool("p", LAYOUT, pool_size(8))
            async with await pool.allocate(range(128)):
                waiting = asyncio.create_task(pool.allocate(range(1000, 1128), wait_s=30))
                while (await pool.stats()).waiting_count == 0:
                    await asyncio.sleep(0)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
            async with await pool.allocate(range(2000, 2128), wait_s=10):
                assert ((await pool.stats()).waiting_count, (await pool.stats()).sequence_count) == (0, 1)

    asyncio.run(body())


def test_cancelling_a_granted_allocate_gives_its_blocks_back(start_fresh: StartService) -> None:
    """C4 for asyncio, at every moment of the call: whatever was granted comes back."""

    async def body() -> None:
        async with await aio.connect(start_fresh().target) as harbor:
            pool = await harbor.open_pool("p", LAYOUT, pool_size(8))
            for turns in range(30):
                granted = asyncio.create_task(pool.allocate(range(128)))
                for _ in range(turns):
                    await asyncio.sleep(0)
                granted.cancel()
                done, _ = await asyncio.wait([granted])
                if not granted.cancelled():
                    await done.pop().result().release()
            async with await pool.allocate(range(2000, 2128), wait_s=10):
                assert (await pool.stats()).sequence_count == 1

    asyncio.run(body())


def test_a_cancelled_commit_is_carried_by_the_next(start_fresh: StartService) -> None:
    """C5 for asyncio: the task is gone, the service may have committed."""

    async def body() -> None:
        async with await aio.connect(start_fresh().target) as harbor:
            pool = await harbor.open_pool("p", LAYOUT, pool_size(8))
            async with await pool.allocate(range(16), reserve_tokens=1) as held:
                commit = asyncio.create_task(held.commit(16, [1]))
                await asyncio.sleep(0)
                commit.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await commit
                with pytest.raises(SequenceInDoubt):
                    await held.commit(16, [2])
                await held.commit(16, [1])
                assert held.token_count == 17

    asyncio.run(body())


def test_closing_the_harbor_under_a_waiting_call_is_told_to_its_task(start_fresh: StartService) -> None:
    """The task was not cancelled, so it must not look as if it was."""

    async def body() -> None:
        harbor = await aio.connect(start_fresh().target)
        pool = await harbor.open_pool("p", LAYOUT, pool_size(8))
        held = await pool.allocate(range(128))
        waiting = asyncio.create_task(pool.allocate(range(1000, 1128), wait_s=30))
        while (await pool.stats()).waiting_count == 0:
            await asyncio.sleep(0)
        await harbor.close()
        with pytest.raises((HarborClosed, SessionLost, PoolExhausted)):
            await waiting
        await held.release()

    asyncio.run(body())
