"""Single flight: a cold prompt is computed once, whoever asks for it [S30]."""

import asyncio
import functools

import pytest

from flight_bench import BLOCK_TOKENS, COLD_TOKENS, MINUTE_S, Bench, prompt_of
from jumping_loop import run_jumping
from kvharbor.pool import Commit
from kvharbor.pool.steps import finish
from kvharbor.pool.writers import PATIENCE_S
from scenarios import settled


@pytest.mark.parametrize("slice_blocks", [512, 4])
def test_of_many_that_ask_for_a_cold_prompt_one_computes_it(slice_blocks: int) -> None:
    """[W3] The others are answered at its last commit, with all that may be reused, and hold nothing before."""

    async def scenario() -> None:
        bench = Bench(session_count=64, slice_blocks=slice_blocks)
        prompts = [prompt_of(1_000_000 + session) for session in range(1, 65)]
        tasks = [bench.ask(session, prompt) for session, prompt in enumerate(prompts, start=1)]
        await settled()
        (granted,) = [task for task in tasks if task.done()]
        assert (bench.waiting_count, bench.pool.stats().sequence_count) == (63, 1)
        writer = granted.result()
        for computed in range(512, COLD_TOKENS, 512):
            await bench.commit(writer, computed)
            await asyncio.sleep(PATIENCE_S * 0.75)
            assert [task for task in tasks if task.done()] == [granted], "answered before all was there"
        await bench.commit(writer, COLD_TOKENS)
        views = await asyncio.gather(*tasks)
        assert sorted(view.cached_tokens for view in views) == [0] + [COLD_TOKENS] * 63
        counters = bench.pool.stats().counters
        assert (counters.committed_block_count, counters.shadow_block_count) == (COLD_TOKENS // BLOCK_TOKENS, 0)
        assert (counters.pending_wait_count, counters.takeover_count) == (63, 0)
        bench.check()

    run_jumping(scenario)


def test_nobody_waits_for_his_own_session() -> None:
    """[W4] A scheduler with one thread asks for the same prefix twice, and could not commit in between."""

    async def scenario() -> None:
        bench = Bench()
        first = await bench.ask(1, prompt_of(1))
        second = await bench.ask(1, prompt_of(2))
        assert (first.pending, second.pending, bench.now()) == (None, None, 1000.0)
        third = await bench.ask(2, prompt_of(3), pending_wait_s=0)
        assert third.pending is not None
        assert (await bench.ask(1, prompt_of(4))).pending is not None, "what another session computes is told"
        assert bench.now() == 1000.0, "it computes that itself"
        bench.check()

    run_jumping(scenario)


def test_a_waiting_session_makes_other_calls_meanwhile() -> None:
    """[S4] [S30] Waiting takes no turn; its other requests are what the one that it waits for may need."""

    async def scenario() -> None:
        bench = Bench()
        writer = await bench.ask(1, prompt_of())
        waiting = bench.ask(2, prompt_of(7))
        await settled()
        other = await bench.ask(2, prompt_of(first=500_000))
        await bench.commit(other, COLD_TOKENS)
        await bench.release(other)
        assert bench.now() == 1000.0
        await bench.commit(writer, COLD_TOKENS)
        assert (await waiting).cached_tokens == COLD_TOKENS
        bench.check()

    run_jumping(scenario)


def test_room_that_comes_to_many_is_taken_by_one_that_computes() -> None:
    """[W3] There is room for two of them, and the second waits for the first instead of computing the same."""

    async def scenario() -> None:
        bench = Bench(block_count=130)
        holder = await bench.ask(1, prompt_of(first=500_000, count=130 * BLOCK_TOKENS))
        tasks = [bench.ask(session, prompt_of(7), wait_s=MINUTE_S) for session in (2, 3)]
        await asyncio.sleep(1)
        assert (bench.admission.waiting_count, bench.waiting_count) == (2, 0)
        await bench.release(holder)
        writer = await tasks[0]
        await settled()
        assert (bench.admission.waiting_count, bench.waiting_count) == (0, 1)
        await bench.commit(writer, COLD_TOKENS)
        assert (await tasks[1]).cached_tokens == COLD_TOKENS
        bench.check()

    run_jumping(scenario)


def test_a_handed_off_sequence_is_still_waited_for() -> None:
    """[W1] Its adopter goes on computing it; if that is the waiter's own session, it waits no more."""

    async def scenario() -> None:
        bench = Bench()
        writer = await bench.ask(1, prompt_of())
        others = [bench.ask(session, prompt_of(7)) for session in (2, 3)]
        await settled()
        finish(bench.pool.handoff(1, writer.number, Commit(64), token="t", expires_at=1e9))
        await settled()
        assert bench.waiting_count == 2
        adopted = bench.owner.call(lambda: bench.pool.adopt(2, "t")).view
        assert (await others[0]).cached_tokens == 64
        await bench.commit(adopted, COLD_TOKENS)
        assert (await others[1]).cached_tokens == COLD_TOKENS
        bench.check()

    run_jumping(scenario)


def test_others_are_served_while_a_crowd_is_woken() -> None:
    """[S14] One commit may answer a thousand: each in a step of its own, in order of arrival."""

    async def scenario() -> None:
        bench = Bench(session_count=101)
        writer = await bench.ask(101, prompt_of())
        order: list[int] = []
        tasks = [bench.ask(session, prompt_of(session)) for session in range(1, 101)]
        for session, task in enumerate(tasks, start=1):
            task.add_done_callback(functools.partial(_note, order, session))
        await settled()
        await bench.commit(writer, COLD_TOKENS)
        most_answered_at_once = 0
        while (answered := len(order)) < 100:
            await asyncio.sleep(0)
            most_answered_at_once = max(most_answered_at_once, len(order) - answered)
        assert (order, most_answered_at_once) == (list(range(1, 101)), 1)
        bench.check()

    run_jumping(scenario)


def _note(order: list[int], session: int, _: object) -> None:
    order.append(session)
