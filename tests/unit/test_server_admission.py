"""Allocates that wait: in order, holding nothing, and always answered."""

import asyncio
import functools

import pytest

from admission_bench import Bench
from kvharbor.pool.errors import PoolExhausted, RequestTooLarge
from kvharbor.pool.steps import finish
from kvharbor.server.scheduling.applications import Patience
from kvharbor.server.session_errors import SessionUnknown
from scenarios import run, settled


def test_a_waiter_is_answered_when_room_comes() -> None:
    """And nobody waits after that."""

    async def scenario() -> None:
        bench = Bench(4)
        held = await bench.allocate(1, 4)
        waiting = bench.allocate(3, 2, wait_s=60)
        await settled()
        assert bench.admission.waiting_count == 1
        await bench.release(held)
        assert len((await waiting).block_ids) == 2
        assert bench.admission.waiting_count == 0

    run(scenario)


def test_without_a_wait_the_refusal_comes_at_once() -> None:
    """With the numbers of now."""

    async def scenario() -> None:
        bench = Bench(4)
        await bench.allocate(1, 3)
        with pytest.raises(PoolExhausted) as refused:
            await bench.allocate(2, 2)
        assert refused.value.metadata()["availableBlockCount"] == "1"
        assert bench.admission.waiting_count == 0

    run(scenario)


def test_a_wait_ends_with_the_refusal_when_its_time_is_over() -> None:
    """The real clock ends it, and it leaves the queue."""

    async def scenario() -> None:
        bench = Bench(2)
        await bench.allocate(1, 2)
        with pytest.raises(PoolExhausted):
            await bench.allocate(2, 1, wait_s=0.01)
        assert bench.admission.waiting_count == 0

    run(scenario)


def test_equal_waiters_are_served_in_order_of_arrival() -> None:
    """One block at a time comes back, and goes to who has waited longest."""

    async def scenario() -> None:
        bench = Bench(2)
        held = [await bench.allocate(1, 1), await bench.allocate(1, 1)]
        order: list[int] = []
        waiting = [bench.allocate(2, 1, wait_s=60) for _ in range(2)]
        for index, task in enumerate(waiting):
            task.add_done_callback(functools.partial(_note, order, index))
        await settled()
        for view in held:
            await bench.release(view)
            await settled()
        await asyncio.gather(*waiting)
        assert order == [0, 1]

    run(scenario)


def test_nobody_passes_a_head_that_has_waited_half_its_time() -> None:
    """Before that a small request gets by; after it the room gathers for the head."""

    async def scenario() -> None:
        bench = Bench(4)
        held = [await bench.allocate(1, 1) for _ in range(4)]
        head = bench.allocate(2, 4, wait_s=60)
        await settled()
        await bench.release(held.pop())
        await bench.release(await bench.allocate(1, 1))
        bench.now += 31
        with pytest.raises(PoolExhausted):
            await bench.allocate(1, 1)
        other_tenant = await bench.allocate(3, 1)
        await bench.release(other_tenant)
        late = bench.allocate(1, 1, wait_s=60)
        await settled()
        assert not late.done()
        for view in held:
            await bench.release(view)
        await bench.release(await head)
        assert len((await late).block_ids) == 1

    run(scenario)


def test_what_can_never_fit_is_not_queued() -> None:
    """Not even behind an impatient head."""

    async def scenario() -> None:
        bench = Bench(2)
        await bench.allocate(1, 2)
        bench.allocate(2, 2, wait_s=60)
        await settled()
        bench.now += 59
        with pytest.raises(RequestTooLarge):
            await bench.allocate(1, 3, wait_s=60)
        bench.admission.give_up_all(SessionUnknown())

    run(scenario)


def test_a_caller_that_leaves_makes_way() -> None:
    """Its ticket is gone, and who was behind it is tried."""

    async def scenario() -> None:
        bench = Bench(4)
        held = [await bench.allocate(1, 2), await bench.allocate(1, 2)]
        head = bench.allocate(2, 4, wait_s=60)
        await settled()
        bench.now += 31
        behind = bench.allocate(2, 2, wait_s=60)
        await settled()
        await bench.release(held[0])
        await settled()
        assert not behind.done()
        head.cancel()
        assert len((await behind).block_ids) == 2

    run(scenario)


def test_the_end_of_its_session_ends_a_wait() -> None:
    """And the pool is not asked for a session that is gone."""

    async def scenario() -> None:
        bench = Bench(2)
        held = await bench.allocate(1, 2)
        waiting = bench.allocate(2, 1, wait_s=60)
        await settled()
        bench.applicants[2].ended = True
        bench.admission.give_up(bench.applicants[2], SessionUnknown())
        finish(bench.pool.end_session(2))
        finish(bench.pool.session_quiet(2))
        await bench.release(held)
        with pytest.raises(SessionUnknown):
            await waiting
        assert bench.crashes == []

    run(scenario)


def _note(order: list[int], index: int, _: object) -> None:
    order.append(index)


def test_who_lacks_room_is_made_known() -> None:
    """With the blocks that he lacks: refused at once, or waiting."""

    async def scenario() -> None:
        bench = Bench(4)
        wanted: list[tuple[int, int]] = []
        bench.admission.wanted = lambda applicant, block_count: wanted.append((applicant.number, block_count))
        await bench.allocate(1, 3)
        with pytest.raises(PoolExhausted):
            await bench.allocate(2, 3)
        waiting = bench.allocate(3, 2, wait_s=60)
        await settled()
        assert wanted == [(2, 2), (3, 1)]
        assert [(applicant.number, lacking) for applicant, lacking in bench.admission.waiting()] == [(3, 1)]
        assert (bench.admission.wait_count, bench.admission.waiting_count) == (1, 1)
        waiting.cancel()

    run(scenario)


def test_an_end_of_patience_ends_a_wait_as_its_time_does() -> None:
    """Before or while it waits, with the refusal; a grant that has come is not taken back."""

    async def scenario() -> None:
        bench = Bench(2)
        held = await bench.allocate(1, 2)
        patience = Patience()
        waiting = bench.allocate(2, 1, wait_s=60, patience=patience)
        await settled()
        patience.end()
        with pytest.raises(PoolExhausted):
            await waiting
        with pytest.raises(PoolExhausted):
            await bench.allocate(2, 1, wait_s=60, patience=patience)
        patience = Patience()
        waiting = bench.allocate(2, 1, wait_s=60, patience=patience)
        await settled()
        await bench.release(held)
        await settled()
        patience.end()
        assert len((await waiting).block_ids) == 1

    run(scenario)


def test_an_end_of_patience_before_the_wait_has_begun_counts_too() -> None:
    """The request still waits for its session's turn; then it is tried once."""

    async def scenario() -> None:
        bench = Bench(2)
        await bench.allocate(1, 2)
        patience = Patience()
        assert bench.turns[2].try_take()
        waiting = bench.allocate(2, 1, wait_s=60, patience=patience)
        await settled()
        patience.end()
        bench.turns[2].leave()
        with pytest.raises(PoolExhausted):
            await waiting

    run(scenario)
