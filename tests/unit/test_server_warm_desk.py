"""Pins and tasks of one pool, by operators and engines that meet at the desk."""

import asyncio
import struct
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

import pytest

from kvharbor.pool import Commit, Pool, PoolConfig, Prompt
from kvharbor.pool.errors import PinNotFound, PoolExhausted, RequestIdReused, WarmBudgetExceeded
from kvharbor.server.errors import Draining, WarmTaskNotFound
from kvharbor.server.event_log import EventLog
from kvharbor.server.owner import PoolOwner, offset_clock
from kvharbor.server.peer import Peer
from kvharbor.server.session import Session
from kvharbor.server.turns import Turns
from kvharbor.server.warm_desk import Claimed, Ordered, PinRequest, WarmDesk
from kvharbor.server.warm_notices import WarmNotices

Scenario = Callable[["Site"], Coroutine[Any, Any, None]]


def crash(failure: BaseException) -> NoReturn:
    raise AssertionError("the process would end") from failure


def asked(*ids: int, name: str = "w", expires_at: float | None = None) -> PinRequest:
    return PinRequest(Prompt(struct.pack(f"<{len(ids)}I", *ids)), name, expires_at)


class Site:
    """A desk over a pool of 8 blocks of 2 tokens, and engines that accept tasks."""

    def __init__(self) -> None:
        self.pool = Pool(PoolConfig(8, 2, slice_blocks=1, warm_budget_ratio=0.5))
        self.owner = PoolOwner(self.pool, EventLog(1 << 20), offset_clock(1e6), crash)
        self.sessions: set[Session] = set()
        self.turns: dict[int, Turns] = {}
        self.desk = WarmDesk(self.owner, tenant="t", pool_id="p", sessions=self.sessions)

    def engine(self) -> Session:
        """Returns an engine that has the pool open."""
        number = len(self.turns) + 1
        session = Session(number, "secret", Peer(0, 0, "t", False), "", "", WarmNotices())
        self.pool.open_session(number, "t")
        self.turns[number] = Turns()
        self.sessions.add(session)
        return session

    async def claim(self, session: Session, request_id: str = "c") -> Claimed:
        return await self.desk.claim(session, self.turns[session.number], request_id)

    async def commit(self, session: Session, claimed: Claimed, token_count: int) -> None:
        sequence = claimed.sequence.number
        await self.owner.run(
            self.turns[session.number], lambda: self.pool.commit(session.number, sequence, Commit(token_count))
        )

    async def release(self, session: Session, claimed: Claimed) -> None:
        await self.owner.run(
            self.turns[session.number], lambda: self.pool.release(session.number, claimed.sequence.number)
        )

    async def lose(self, session: Session) -> None:
        """The engine dies and is proved gone."""
        turns = self.turns[session.number]
        await self.owner.run(turns, lambda: self.pool.end_session(session.number))
        await self.owner.run(turns, lambda: self.pool.session_quiet(session.number))
        self.sessions.discard(session)


def on_site(scenario: Scenario) -> None:
    async def main() -> None:
        site = Site()
        await scenario(site)
        site.pool.check_invariants()
        site.desk.end_waits(Draining())
        await site.owner.close()

    asyncio.run(main())


async def told(session: Session) -> bool:
    """Whether there is a notice to send; takes it."""
    assert session.warm_notices is not None
    try:
        async with asyncio.timeout(0):
            return await session.warm_notices.next() == "p"
    except TimeoutError:
        return False


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
