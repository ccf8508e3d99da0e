"""Single flight: what ends a wait for others, which is never longer than the caller wants [W6]."""

import asyncio

import pytest

from flight_bench import COLD_TOKENS, Bench, prompt_of
from jumping_loop import run_jumping
from kvharbor.pool import Prompt
from kvharbor.pool.errors import PoolExhausted
from kvharbor.server.scheduling.applications import Patience
from kvharbor.server.session_errors import SessionUnknown
from scenarios import settled


def test_the_time_of_a_wait_is_kept() -> None:
    """[W6] Then the caller computes what is not there, and the answer says who else does."""

    async def scenario() -> None:
        bench = Bench()
        writer = await bench.ask(1, prompt_of())
        began_at = bench.now()
        other = bench.ask(2, prompt_of(7), pending_wait_s=0.75)
        await asyncio.sleep(0.5)
        await bench.commit(writer, 640)
        view = await other
        assert bench.now() - began_at == pytest.approx(0.75)
        assert view.pending is not None
        assert (view.cached_tokens, view.pending.token_count, view.pending.session) == (640, COLD_TOKENS - 640, 1)
        assert view.pending.idle_s == pytest.approx(0.25)
        assert bench.pool.stats().counters.takeover_count == 0
        bench.check()

    run_jumping(scenario)


def test_each_of_the_two_waits_has_its_own_time() -> None:
    """[W6] What it waits for others is not lost for its wait for room, which comes after that."""

    async def scenario() -> None:
        bench = Bench(block_count=65)
        writer = await bench.ask(1, prompt_of(7))
        other = bench.ask(2, prompt_of(8), pending_wait_s=5.0, wait_s=3.0)
        await asyncio.sleep(1.5)
        await bench.commit(writer, COLD_TOKENS)
        with pytest.raises(PoolExhausted):
            await other
        assert bench.now() == pytest.approx(1000.0 + 1.5 + 3.0)
        bench.check()

    run_jumping(scenario)


def test_the_end_of_its_session_or_of_the_pool_ends_a_wait() -> None:
    """And the pool is not asked for a session that is gone."""

    async def scenario() -> None:
        bench = Bench()
        writer = await bench.ask(1, prompt_of())
        waiting = [bench.ask(session, prompt_of(7)) for session in (2, 3)]
        await settled()
        await bench.commit(writer, COLD_TOKENS)  # wakes them: their session ends while they are on their way
        await bench.lose(2)
        with pytest.raises(SessionUnknown):
            await waiting[0]
        late = bench.ask(4, Prompt(prompt_of(first=500_000).token_ids))
        later = bench.ask(3, prompt_of(8, first=500_000))
        await waiting[1]
        await late
        await settled()
        bench.admission.give_up_all(SessionUnknown())
        with pytest.raises(SessionUnknown):
            await later
        bench.check()

    run_jumping(scenario)


def test_a_caller_that_leaves_leaves_nothing_behind() -> None:
    """Whether it sleeps or is being admitted."""

    async def scenario() -> None:
        bench = Bench(slice_blocks=4)
        writer = await bench.ask(1, prompt_of())
        waiting = bench.ask(2, prompt_of(7))
        await settled()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        bench.check()
        await bench.commit(writer, COLD_TOKENS // 2)
        for turns in range(12):
            waiting = bench.ask(2, prompt_of(7))
            for _ in range(turns):
                await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await settled()
        await bench.release(writer)
        bench.check()

    run_jumping(scenario)


@pytest.mark.parametrize("is_early", [False, True])
def test_an_end_of_patience_has_the_caller_compute_it_himself(is_early: bool) -> None:
    """[W6] As at the end of his time: while he waits, or before his wait has begun."""

    async def scenario() -> None:
        bench = Bench()
        writer = await bench.ask(1, prompt_of())
        patience, began_at = Patience(), bench.now()
        assert bench.turns[2].try_take()
        waiting = bench.ask(2, prompt_of(), patience=patience)
        await settled()
        if is_early:
            patience.end()
        bench.turns[2].leave()
        await settled()
        if not is_early:
            assert not waiting.done()
            patience.end()
        assert ((await waiting).cached_tokens, bench.now()) == (0, began_at)
        await bench.release(writer)
        bench.check()

    run_jumping(scenario)
