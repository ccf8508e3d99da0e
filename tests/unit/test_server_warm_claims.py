"""Engines at the desk of one pool: who is told of a task, who gets it, and who gets it after him."""

import asyncio

import pytest

from kvharbor.pool.errors import PoolExhausted, RequestIdReused
from kvharbor.server.errors import WarmTaskNotFound
from kvharbor.server.pools.warm_desk import Ordered
from warm_site import Site, asked, on_site, told


def test_an_order_is_filled_by_the_engine_that_claims_it() -> None:
    """All that accept are told, one gets it, and the pin is whole when the last block is committed."""

    async def scenario(site: Site) -> None:
        first, second = site.engine(), site.engine()
        assert await site.desk.by_engine(asked(1, 2, 3, 4, 5), 0) == Ordered(0, 4, task_pending=True)
        assert (await told(first), await told(second)) == (True, True)
        claimed = await site.claim(first)
        assert (claimed.asked.name, claimed.sequence.token_count, claimed.sequence.cached_tokens) == ("w", 4, 0)
        with pytest.raises(WarmTaskNotFound):
            await site.claim(second)
        await site.commit(first, claimed, 2)
        assert await site.desk.by_engine(asked(1, 2, 3, 4, 5), 0) == Ordered(2, 2, task_pending=True)
        await site.commit(first, claimed, 4)
        assert await site.desk.by_engine(asked(1, 2, 3, 4, 5), 0) == Ordered(4, 0, task_pending=False)
        await site.release(first, claimed)
        assert site.pool.stats().warm_block_count == 2

    on_site(scenario)


def test_a_dead_engines_task_goes_to_another_that_starts_where_it_stopped() -> None:
    """What was committed is pinned; the rest is the second engine's."""

    async def scenario(site: Site) -> None:
        first, second = site.engine(), site.engine()
        await site.desk.by_engine(asked(1, 2, 3, 4), 0)
        claimed = await site.claim(first)
        with pytest.raises(WarmTaskNotFound):
            await site.claim(second)
        assert await told(second)
        await site.commit(first, claimed, 2)
        await site.lose(first)
        assert await told(second)
        again = await site.claim(second)
        assert (again.asked, again.sequence.cached_tokens) == (claimed.asked, 2)
        await site.commit(second, again, 4)
        assert site.pool.pin("t", "w") is not None
        assert await site.desk.by_engine(asked(1, 2, 3, 4), 0) == Ordered(4, 0, task_pending=False)

    on_site(scenario)


def test_an_engine_that_releases_early_gives_the_task_back_three_times_at_most() -> None:
    """Whoever waits for it is answered then."""

    async def scenario(site: Site) -> None:
        engine = site.engine()
        waiting = asyncio.create_task(site.desk.by_engine(asked(1, 2), 60))
        await asyncio.sleep(0)
        for _ in range(3):
            await site.release(engine, await site.claim(engine))
        assert await waiting == Ordered(0, 2, task_pending=False)
        with pytest.raises(WarmTaskNotFound):
            await site.claim(engine)
        assert site.pool.usage().pin_count == 0

    on_site(scenario)


def test_a_repeated_claim_gets_the_same_sequence() -> None:
    """As its reply may have been lost; another request_id is another claim."""

    async def scenario(site: Site) -> None:
        engine = site.engine()
        await site.desk.by_engine(asked(1, 2, name="x"), 0)
        await site.desk.by_engine(asked(3, 4, name="y"), 0)
        first, again, other = await site.claim(engine), await site.claim(engine), await site.claim(engine, "d")
        assert (first, first.asked.name, other.asked.name) == (again, "x", "y")
        assert (first.sequence.request_id, site.pool.usage().sequence_count) == ("c", 2)
        released = await site.owner.run(site.turns[1], lambda: site.pool.release_request(1, "c"))
        assert released == 1
        assert (await site.claim(engine, "e")).asked.name == "x"
        await site.desk.by_engine(asked(5, 6, name="z"), 0)
        await site.owner.run(site.turns[1], lambda: site.pool.allocate(1, asked(7).prompt, request_id="f"))
        with pytest.raises(RequestIdReused):
            await site.claim(engine, "f")

    on_site(scenario)


def test_a_claim_without_room_leaves_the_task_where_it_is() -> None:
    """It costs no claim, and the next one may have room."""

    async def scenario(site: Site) -> None:
        engine = site.engine()
        await site.desk.by_engine(asked(1, 2), 0)
        full = await site.owner.run(site.turns[1], lambda: site.pool.allocate(1, asked(*range(16)).prompt))
        for _ in range(4):
            with pytest.raises(PoolExhausted):
                await site.claim(engine)
        await site.owner.run(site.turns[1], lambda: site.pool.release(1, full.number))
        assert (await site.claim(engine)).asked.name == "w"

    on_site(scenario)


def test_a_session_has_one_notice_until_it_claims() -> None:
    """Bounded by that, not by the tasks: it is told again of what is left."""

    async def scenario(site: Site) -> None:
        engine = site.engine()
        for name in ("x", "y"):
            await site.desk.by_engine(asked(1, 2, name=name), 0)
        assert [await told(engine), await told(engine)] == [True, False]
        await site.claim(engine, "c")
        assert [await told(engine), await told(engine)] == [True, False]
        await site.claim(engine, "d")
        assert not await told(engine)

    on_site(scenario)


def test_whoever_gets_the_memory_is_told_of_what_waits() -> None:
    """Also if it was told before it could compute; without a task nobody is told."""

    async def scenario(site: Site) -> None:
        early = site.engine()
        site.desk.welcome(early)
        assert not await told(early)
        await site.desk.by_engine(asked(1, 2), 0)
        assert await told(early)
        site.desk.welcome(early)
        assert await told(early)
        late = site.engine()
        site.desk.welcome(late)
        assert await told(late)
        assert site.desk.accepting_session_count == 2

    on_site(scenario)
