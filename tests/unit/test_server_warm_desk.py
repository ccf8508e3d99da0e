"""Orders of one pool at the desk where operators and engines meet: what becomes of each."""

import asyncio

import pytest

from kvharbor.pool import Commit
from kvharbor.pool.errors import PinNotFound, WarmBudgetExceeded
from kvharbor.server.errors import Draining, WarmTaskNotFound
from kvharbor.server.pools.warm_desk import Ordered
from warm_site import Site, asked, on_site, told


def test_unwarm_ends_a_task_of_which_nothing_is_there_yet() -> None:
    """There is no pin then, and it is no error; the second time there is neither."""

    async def scenario(site: Site) -> None:
        engine = site.engine()
        waiting = asyncio.create_task(site.desk.by_engine(asked(1, 2), 60))
        await asyncio.sleep(0)
        await site.desk.unwarm("w")
        assert await waiting == Ordered(0, 2, task_pending=False)
        with pytest.raises(PinNotFound):
            await site.desk.unwarm("w")
        with pytest.raises(WarmTaskNotFound):
            await site.claim(engine)

    on_site(scenario)


def test_unwarm_while_an_engine_fills_leaves_it_an_ordinary_sequence() -> None:
    """Nothing is pinned any more, and nobody is told to go on with it."""

    async def scenario(site: Site) -> None:
        engine = site.engine()
        await site.desk.by_engine(asked(1, 2, 3, 4), 0)
        claimed = await site.claim(engine)
        await told(engine)
        await site.desk.unwarm("w")
        await site.commit(engine, claimed, 4)
        await site.release(engine, claimed)
        stats = site.pool.stats()
        assert (stats.cached_block_count, stats.warm_block_count, await told(engine)) == (2, 0, False)

    on_site(scenario)


def test_the_last_request_for_a_name_decides_who_fills() -> None:
    """A caller's own Warmup, or one for what is there, takes the task back."""

    async def scenario(site: Site) -> None:
        engine = site.engine()
        await site.desk.by_engine(asked(1, 2), 0)
        mine = await site.desk.by_caller(engine, site.turns[1], asked(1, 2))
        assert mine.sequence is not None
        with pytest.raises(WarmTaskNotFound):
            await site.claim(engine)
        await site.desk.by_engine(asked(3, 4), 0)
        await site.desk.by_nobody(asked(3, 4))
        with pytest.raises(WarmTaskNotFound):
            await site.claim(engine)

    on_site(scenario)


def test_an_order_of_what_a_caller_is_computing_waits_for_how_that_ends() -> None:
    """No engine is told meanwhile; when the caller gives up, one is."""

    async def scenario(site: Site) -> None:
        caller, engine = site.engine(), site.engine()
        mine = await site.desk.by_caller(caller, site.turns[1], asked(1, 2, 3, 4))
        assert mine.sequence is not None
        assert await site.desk.by_engine(asked(1, 2, 3, 4), 0) == Ordered(0, 4, task_pending=True)
        assert not await told(engine)
        number = mine.sequence.number
        await site.owner.run(site.turns[1], lambda: site.pool.release(1, number))
        assert await told(engine)
        assert (await site.claim(engine)).sequence.cached_tokens == 0

    on_site(scenario)


def test_what_others_have_computed_meanwhile_needs_no_engine() -> None:
    """A claim ends such tasks on the way, pins them, and gives the next one."""

    async def scenario(site: Site) -> None:
        engine = site.engine()
        await site.desk.by_engine(asked(1, 2, name="x"), 0)
        await site.desk.by_engine(asked(3, 4, name="y"), 0)
        turns = site.turns[1]
        view = await site.owner.run(turns, lambda: site.pool.allocate(1, asked(1, 2).prompt))
        await site.owner.run(turns, lambda: site.pool.commit(1, view.number, Commit(2)))
        await site.owner.run(turns, lambda: site.pool.release(1, view.number))
        assert (await site.claim(engine)).asked.name == "y"
        assert site.pool.stats().warm_block_count == 1

    on_site(scenario)


def test_an_order_beyond_the_budget_is_refused_whole() -> None:
    """Although nothing of it is promised yet: else it would be refused where nobody sees it."""

    async def scenario(site: Site) -> None:
        engine = site.engine()
        with pytest.raises(WarmBudgetExceeded):
            await site.desk.by_engine(asked(*range(10)), 0)
        assert not await told(engine)
        assert site.pool.stats().warm_budget_used_block_count == 0

    on_site(scenario)


def test_a_pins_time_ends_its_task() -> None:
    """Before an engine is at it as well as under its hands."""

    async def scenario(site: Site) -> None:
        engine = site.engine()
        soon = site.owner.clock() + 0.02
        await site.desk.by_engine(asked(1, 2, name="x", expires_at=soon), 0)
        claimed = await site.claim(engine)
        waiting = site.desk.by_engine(asked(3, 4, name="y", expires_at=soon), 60)
        other = site.desk.by_engine(asked(1, 2, name="x", expires_at=soon), 60)
        assert [await other, await waiting] == [Ordered(0, 2, False)] * 2
        await site.release(engine, claimed)
        with pytest.raises(WarmTaskNotFound):
            await site.claim(engine)

    on_site(scenario)


def test_shutdown_ends_the_waiting() -> None:
    """With its reason, and at once."""

    async def scenario(site: Site) -> None:
        waiting = asyncio.create_task(site.desk.by_engine(asked(1, 2), 60))
        await asyncio.sleep(0)
        site.desk.end_waits(Draining())
        with pytest.raises(Draining):
            await waiting

    on_site(scenario)
