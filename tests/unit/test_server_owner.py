"""The owner of a pool: operations end, sessions keep their order, and an unknown state ends the process."""

import asyncio
from array import array
from collections.abc import Awaitable, Callable

import pytest

from kvharbor.pool import Commit, Pool, PoolConfig, Prompt, SequenceView
from kvharbor.pool.errors import InvalidField, InvariantViolation, PoolExhausted
from kvharbor.pool.steps import Steps
from kvharbor.server.scheduling.event_log import EventLog
from kvharbor.server.scheduling.owner import PoolOwner, offset_clock
from kvharbor.server.scheduling.turns import Turns
from scenarios import run


class Crashed(BaseException):
    """Stands for the end of the process."""


def crash(failure: BaseException) -> None:
    """Ends a test's process."""
    raise Crashed from failure


def owned(block_count: int = 4000) -> PoolOwner:
    """Returns a pool with one session, 1."""
    pool = Pool(PoolConfig(block_count=block_count, block_tokens=1))
    pool.open_session(1, "t")
    return PoolOwner(pool, EventLog(1 << 20), offset_clock(1e6), crash)


def prompt(token_count: int) -> Prompt:
    """Returns a prompt of so many tokens, each a block."""
    return Prompt(array("I", range(token_count)).tobytes())


def only(change: Callable[[], None]) -> Steps[None]:
    """An operation of one slice."""
    change()
    return
    yield


def test_a_short_operation_never_gives_up_control() -> None:
    """The ordinary call costs no task and no round through the event loop."""

    async def scenario() -> None:
        owner = owned()
        coroutine = owner.run(Turns(), lambda: owner.pool.allocate(1, prompt(10)))
        with pytest.raises(StopIteration):
            coroutine.send(None)

    run(scenario)


def test_between_two_slices_others_run() -> None:
    """A call of thousands of blocks does not hold up a small one of another session."""

    async def scenario() -> None:
        owner = owned()
        owner.pool.open_session(2, "t")
        large = asyncio.create_task(owner.run(Turns(), lambda: owner.pool.allocate(1, prompt(3000))))
        await asyncio.sleep(0)
        small = await owner.run(Turns(), lambda: owner.pool.allocate(2, prompt(10)))
        assert len(small.block_ids) == 10
        assert not large.done()
        assert len((await large).block_ids) == 3000

    run(scenario)


def test_what_takes_some_rounds_of_the_loop_waits_for_one_slice() -> None:
    """[S14] A call is received, dispatched and answered in rounds of their own: not each of them behind a slice."""

    async def scenario() -> None:
        owner = owned()
        slices: list[int] = []

        def long_one() -> Steps[None]:
            for number in range(100):
                slices.append(number)
                yield

        large = asyncio.create_task(owner.run(Turns(), long_one))
        await asyncio.sleep(0)
        for _ in range(10):
            before = len(slices)
            for _ in range(4):
                await asyncio.sleep(0)
            assert len(slices) - before <= 1
        await large
        assert slices == [*range(100)]

    run(scenario)


def test_many_small_calls_do_not_starve_a_long_one() -> None:
    """[S14] Between two of its slices nobody who calls again and again is served more than a few times."""

    async def scenario() -> None:
        owner = owned()
        served = [0] * 100
        between: list[int] = []

        def long_one() -> Steps[None]:
            for _ in range(20):
                between.append(max(served))
                served[:] = [0] * len(served)
                yield

        async def call_again_and_again(caller: int) -> None:
            turns = Turns()

            def count() -> None:
                served[caller] += 1

            while not large.done():
                await owner.run(turns, lambda: only(count))
                await asyncio.sleep(0)

        large = asyncio.create_task(owner.run(Turns(), long_one))
        await asyncio.gather(*(call_again_and_again(caller) for caller in range(len(served))))
        assert len(between) == 20
        assert max(between) <= 5

    run(scenario)


def test_calls_of_one_session_keep_their_order() -> None:
    """A Release cannot overtake the Allocate before it, though that takes many slices."""

    async def scenario() -> None:
        owner, turns = owned(), Turns()
        allocate = asyncio.create_task(owner.run(turns, lambda: owner.pool.allocate(1, prompt(3000))))
        await asyncio.sleep(0)
        released = await owner.run(turns, lambda: owner.pool.release(1, 1))
        assert allocate.done()
        assert (released, owner.pool.stats().free_block_count) == (1, 4000)

    run(scenario)


def test_an_operation_ends_though_its_caller_is_gone() -> None:
    """The sequence is there afterwards, for a retry or a Release to find."""

    async def scenario() -> None:
        owner, turns = owned(), Turns()
        call = asyncio.create_task(owner.run(turns, lambda: owner.pool.allocate(1, prompt(3000), request_id="r")))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
        assert await owner.run(turns, lambda: owner.pool.release_request(1, "r")) == 1

    run(scenario)


def test_a_refusal_leaves_the_turn() -> None:
    """The next call of the session is served."""

    async def scenario() -> None:
        owner, turns = owned(2), Turns()
        with pytest.raises(InvalidField):
            await owner.run(turns, lambda: owner.pool.allocate(1, Prompt(b"")))
        assert len((await owner.run(turns, lambda: owner.pool.allocate(1, prompt(2)))).block_ids) == 2

    run(scenario)


@pytest.mark.parametrize("slices", [0, 1])
@pytest.mark.parametrize("failure", [InvariantViolation(rule="P4", detail="twice"), KeyError(1)])
def test_a_broken_rule_ends_the_process(failure: Exception, slices: int) -> None:
    """Whether it shows in the first slice or later."""

    def broken() -> Steps[None]:
        for _ in range(slices):
            yield
        raise failure

    async def scenario() -> None:
        owner = owned()
        with pytest.raises(Crashed):
            await owner.run(Turns(), broken)

    run(scenario)


def forked(
    owner: PoolOwner, view: SequenceView, copied: list[tuple[tuple[int, int], ...]], turns: Turns
) -> Awaitable[tuple[SequenceView, ...]]:
    """Forks a sequence twice, with a copy that only notes what it was asked for."""

    async def copy(pairs: tuple[tuple[int, int], ...]) -> None:
        copied.append(pairs)
        await asyncio.sleep(0)

    return owner.fork(turns, lambda: owner.pool.fork(1, view.number, 2), copy)


def test_a_fork_is_one_turn_with_its_copies() -> None:
    """A retry with the same request_id must not find children whose copies are still running."""

    async def scenario() -> None:
        owner, turns = owned_tail()
        view = await owner.run(turns, lambda: owner.pool.allocate(1, prompt(3)))
        await owner.run(turns, lambda: owner.pool.commit(1, view.number, Commit(computed_tokens=3)))
        copied: list[tuple[tuple[int, int], ...]] = []
        fork = asyncio.ensure_future(forked(owner, view, copied, turns))
        await asyncio.sleep(0)
        assert not turns.try_take()
        children = await fork
        assert [len(pairs) for pairs in copied] == [2]
        assert len({child.block_ids[0] for child in children}) == 2
        assert turns.try_take()

    run(scenario)


def test_a_copy_that_fails_undoes_the_fork() -> None:
    """All children or none."""

    async def scenario() -> None:
        owner, turns = owned_tail()
        view = await owner.run(turns, lambda: owner.pool.allocate(1, prompt(3)))
        await owner.run(turns, lambda: owner.pool.commit(1, view.number, Commit(computed_tokens=3)))
        before = owner.pool.stats()

        async def copy(pairs: tuple[tuple[int, int], ...]) -> None:
            raise PoolExhausted(**dict.fromkeys(EXHAUSTED, 0))

        with pytest.raises(PoolExhausted):
            await owner.fork(turns, lambda: owner.pool.fork(1, view.number, 2), copy)
        after = owner.pool.stats()
        assert (after.sequence_count, after.free_block_count) == (before.sequence_count, before.free_block_count)
        assert turns.try_take()

    run(scenario)


def test_what_has_a_time_to_live_ends_by_itself() -> None:
    """The timer follows the next deadline; nothing has to be called for it."""

    async def scenario() -> None:
        owner, turns = owned(), Turns()
        await owner.run(turns, lambda: owner.pool.allocate(1, prompt(3)))
        deadline = owner.clock() + 0.01
        await owner.run(
            turns, lambda: owner.pool.handoff(1, 1, Commit(computed_tokens=3), token="x", expires_at=deadline)
        )
        changed = asyncio.Event()
        owner.listeners.append(changed.set)
        owner.reschedule()
        await changed.wait()
        assert owner.pool.stats().sequence_count == 0
        await owner.close()

    run(scenario)


EXHAUSTED = [
    f"{name}_block_count"
    for name in ("needed", "available", "usable", "free", "cached", "reserved", "active", "warm", "quarantined")
]


def owned_tail() -> tuple[PoolOwner, Turns]:
    """Returns a pool with blocks of 16 tokens, so that a short sequence has a tail."""
    pool = Pool(PoolConfig(block_count=8, block_tokens=16))
    pool.open_session(1, "t")
    return PoolOwner(pool, EventLog(1 << 20), offset_clock(1e6), crash), Turns()
