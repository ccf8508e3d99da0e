"""Prefixes that an operator wants warm, computed by engines that claim them: both clients."""

import asyncio
import threading
from typing import Any

import pytest

from integration.client_kinds import Connect
from integration.client_worker import LAYOUT, pool_size
from kvharbor.client import (
    ExtraKey,
    HarborClosed,
    InvalidField,
    Namespace,
    PinNotFound,
    SessionLost,
    WarmBudgetExceeded,
    WarmOrder,
    WarmTaskNotFound,
    aio,
    connect,
)

# The fixtures end the sessions, and with them the sequences, which the tests have no other use for then.
pytestmark = pytest.mark.filterwarnings("ignore:sequence .* was not released:ResourceWarning")
BLOCKS = 16
PREFIX = list(range(64))
SPACE = Namespace(version="v7", salt=b"s")


@pytest.fixture
def engine(open_harbor: Connect, target: str) -> Any:
    """A harbor of the client under test that accepts tasks."""
    return open_harbor(target, client_name="engine", accepts_warm_tasks=True)


@pytest.fixture
def operator(open_harbor: Connect, target: str) -> Any:
    """A harbor of the client under test that does not."""
    return open_harbor(target, client_name="operator")


@pytest.fixture
def pool(engine: Any, pool_name: str) -> Any:
    """The engine's pool of 16 blocks, of which 4 may be warm."""
    return engine.open_pool(pool_name, LAYOUT, pool_size(BLOCKS))


def test_an_engine_computes_what_an_operator_orders(engine: Any, operator: Any, pool: Any) -> None:
    """The task has all that the engine needs; committed, the pin is whole, and stays when the sequence ends."""
    with pool.allocate(PREFIX, namespace=SPACE) as held:
        held.commit(16)
    handle = operator.find_pool(pool.name)
    order = handle.warmup_by_engine([*PREFIX, 7], "w", 60, namespace=SPACE, extra_keys=[ExtraKey(20, b"img")])
    assert (order.pinned_tokens, order.missing_tokens, order.ttl_s) == (16, 48, 60)
    assert (order.task_pending, order.accepting_session_count) == (True, 1)
    task = engine.next_warm_task(10)
    assert (task.name, task.tokens.tolist(), task.namespace, task.pool.id) == ("w", PREFIX, SPACE, pool.id)
    assert task.extra_keys == (ExtraKey(20, b"img"),)
    assert 0 < task.ttl_s <= 60
    with task.sequence as sequence:
        assert (sequence.cached_tokens, sequence.token_count) == (16, 64)
        sequence.commit(64)
    assert engine.next_warm_task() is None
    whole = handle.warmup_by_engine(PREFIX, "w", namespace=SPACE, extra_keys=[ExtraKey(20, b"img")])
    assert (whole.pinned_tokens, whole.missing_tokens, whole.task_pending, whole.ttl_s) == (64, 0, False, None)
    assert pool.stats().warm_block_count == 4
    operator.find_pool(pool.name).unwarm("w")


def test_a_task_that_was_released_early_comes_back(engine: Any, operator: Any, pool: Any) -> None:
    """Where it stopped; after the third time it is given up."""
    handle = operator.find_pool(pool.name)
    handle.warmup_by_engine(PREFIX, "w")
    for done in (16, 32, 48):
        with engine.next_warm_task(10).sequence as sequence:
            assert sequence.cached_tokens == done - 16
            sequence.commit(done)
    assert engine.next_warm_task() is None
    order = handle.warmup_by_engine(PREFIX, "w")
    assert (order.pinned_tokens, order.missing_tokens, order.task_pending) == (48, 16, True)
    handle.unwarm("w")


def test_the_second_claimer_finds_nothing(engine: Any, open_harbor: Connect, target: str, pool: Any) -> None:
    """Both are told, and one gets it."""
    other = open_harbor(target, accepts_warm_tasks=True)
    rival = other.open_pool(pool.name, LAYOUT)
    pool.warmup_by_engine(PREFIX, "w")
    task = engine.next_warm_task(10)
    with pytest.raises(WarmTaskNotFound) as error:
        rival.claim_warm_task()
    assert error.value.metadata == {"poolId": pool.id}
    assert other.next_warm_task() is None
    task.sequence.release()
    assert other.next_warm_task(10).name == "w"


def test_tasks_wait_for_an_engine_that_comes_later(operator: Any, open_harbor: Connect, target: str, pool: Any) -> None:
    """It is told when it gets the pool's memory: the notice comes before or after that answer."""
    operator.find_pool(pool.name).warmup_by_engine(PREFIX, "w")
    late = open_harbor(target, accepts_warm_tasks=True)
    assert late.next_warm_task() is None
    late.open_pool(pool.name, LAYOUT)
    assert late.next_warm_task(10).name == "w"


def test_tasks_of_several_pools_come_to_one_harbor(engine: Any, pool: Any) -> None:
    """Each says of which pool it is; opening another pool does not swallow the notice of the first."""
    pool.warmup_by_engine(PREFIX, "w")
    other = engine.open_pool(f"{pool.name}-2", LAYOUT, pool_size(BLOCKS))
    other.warmup_by_engine(PREFIX, "x")
    found = [engine.next_warm_task(10), engine.next_warm_task(10)]
    assert {(task.pool.id, task.name) for task in found} == {(pool.id, "w"), (other.id, "x")}


def test_what_has_no_room_now_is_tried_again(engine: Any, pool: Any) -> None:
    """Until the time is over, and the next call goes on with it."""
    pool.warmup_by_engine(PREFIX, "w")
    with pool.allocate(range(1000, 1000 + BLOCKS * 16)):
        assert engine.next_warm_task(0.05) is None
    assert engine.next_warm_task().name == "w"


def test_an_order_beyond_the_budget_is_refused(pool: Any) -> None:
    """Where the operator sees it, not where an engine would."""
    with pytest.raises(WarmBudgetExceeded):
        pool.warmup_by_engine(range(80), "w")
    with pytest.raises(PinNotFound):
        pool.unwarm("w")


def test_who_does_not_accept_tasks_is_not_told_and_cannot_wait(operator: Any, pool: Any) -> None:
    """The remedy is in the message; a claim is open to every session that has the pool."""
    own = operator.open_pool(pool.name, LAYOUT)
    own.warmup_by_engine(PREFIX, "w")
    with pytest.raises(InvalidField, match="accepts_warm_tasks=True"):
        operator.next_warm_task()
    assert own.claim_warm_task().name == "w"


def test_the_end_of_the_session_ends_the_wait(engine: Any, pool: Any, operator: Any) -> None:
    """Closed, a harbor is no place to wait."""
    engine.close()
    with pytest.raises(HarborClosed):
        engine.next_warm_task(10)


def test_threads_wait_and_attach_over_one_side_socket(target: str, pool_name: str) -> None:
    """A notice that another thread reads, which waits for its own answer, reaches the one that waits for it."""
    names = [f"{pool_name}-{number}" for number in range(8)]
    with connect(target, accepts_warm_tasks=True) as engine, connect(target) as operator:
        pool = engine.open_pool(pool_name, LAYOUT, pool_size(BLOCKS))
        handle = operator.find_pool(pool_name)
        found: list[str] = []

        def serve() -> None:
            while len(found) < len(names):
                task = engine.next_warm_task(20)
                assert task is not None
                task.sequence.commit(16)
                task.sequence.release()
                found.append(task.name)
                task.pool.unwarm(task.name)

        serving = threading.Thread(target=serve)
        serving.start()
        for number, name in enumerate(names):
            engine.open_pool(name, LAYOUT, pool_size(1))
            handle.warmup_by_engine([number] * 16, name)
        serving.join(30)
        assert (not serving.is_alive(), found) == (True, names)
        assert pool.stats().pin_count == 0


def test_unwarm_ends_a_pending_order_and_the_wait_for_it(target: str, pool_name: str) -> None:
    """Before any engine has claimed it, which then gets nothing."""
    with connect(target, accepts_warm_tasks=True) as engine, connect(target) as operator:
        engine.open_pool(pool_name, LAYOUT, pool_size(BLOCKS))
        handle = operator.find_pool(pool_name)
        orders: list[WarmOrder] = []
        waiting = threading.Thread(target=lambda: orders.append(handle.warmup_by_engine(PREFIX, "w", wait_s=60)))
        waiting.start()
        while True:
            try:
                handle.unwarm("w")
            except PinNotFound:
                continue  # not ordered yet
            break
        waiting.join(10)
        assert [WarmOrder(0, 64, None, task_pending=False, accepting_session_count=1)] == orders
        assert engine.next_warm_task() is None


def test_closing_wakes_a_thread_that_waits(target: str) -> None:
    """Also if nothing ever comes."""
    harbor = connect(target, accepts_warm_tasks=True)
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            harbor.next_warm_task(60)
        except (HarborClosed, SessionLost) as failure:
            raised.append(failure)

    waiting = threading.Thread(target=wait)
    waiting.start()
    harbor.close()
    waiting.join(10)
    assert [type(failure) for failure in raised] in ([HarborClosed], [SessionLost])


def test_cancelling_a_wait_loses_no_task(target: str, pool_name: str) -> None:
    """Several tasks of one loop wait; what a cancelled one has read another gets, and close wakes the rest."""

    async def scenario() -> None:
        harbor = await aio.connect(target, accepts_warm_tasks=True)
        pool = await harbor.open_pool(pool_name, LAYOUT, pool_size(BLOCKS))
        for _ in range(20):
            waiting = asyncio.ensure_future(harbor.next_warm_task(60))
            ordering = asyncio.ensure_future(pool.warmup_by_engine(PREFIX, "w"))
            await asyncio.wait([waiting, ordering], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            await asyncio.wait([waiting])
            await ordering
            task = waiting.result() if not waiting.cancelled() else await harbor.next_warm_task(10)
            assert task is not None
            await task.sequence.release()
            await pool.unwarm("w")
        first, second = (asyncio.ensure_future(harbor.next_warm_task(60)) for _ in range(2))
        await asyncio.wait([first, second], timeout=0.02)
        await harbor.close()
        done, _ = await asyncio.wait([first, second], timeout=10)
        assert {type(waited.exception()) for waited in done} <= {HarborClosed, SessionLost}
        assert len(done) == 2

    asyncio.run(scenario())
