"""Single flight: whom a writer is waited for by, and who takes over when it does not go on. Rules [W5] and [W7]."""

import asyncio

import pytest

from flight_bench import BLOCK_TOKENS, COLD_TOKENS, Bench, prompt_of
from jumping_loop import run_jumping
from kvharbor.pool import Prompt
from kvharbor.pool.writers import LONGEST_STEP_S, PATIENCE_S
from scenarios import settled


@pytest.mark.parametrize("how", ["release", "lose"])
def test_a_waiter_takes_over_at_once_when_the_writer_goes_away(how: str) -> None:
    """[W5] The first to wait, from where the writer had come to; the others wait for it then."""

    async def scenario() -> None:
        bench = Bench()
        writer = await bench.ask(1, prompt_of())
        others = []
        for session in (2, 3, 4):
            others.append(bench.ask(session, prompt_of(7)))
            await settled()
        await bench.commit(writer, 1024)
        await settled()
        assert bench.waiting_count == 3
        began_at = bench.now()
        await (bench.release(writer) if how == "release" else bench.lose(1))
        second = await others[0]
        await settled()
        assert (second.cached_tokens, bench.now() - began_at, bench.waiting_count) == (1024, 0.0, 2)
        await bench.commit(second, COLD_TOKENS)
        assert [(await task).cached_tokens for task in others[1:]] == [COLD_TOKENS] * 2
        assert bench.pool.stats().counters.takeover_count == 1
        bench.check()

    run_jumping(scenario)


def test_a_waiter_takes_over_when_the_writer_has_committed_nothing_for_two_seconds() -> None:
    """[W5] Two seconds after its last commit, one of them; the writer may come back and finish first."""

    async def scenario() -> None:
        bench = Bench()
        writer = await bench.ask(1, prompt_of())
        others = [bench.ask(session, prompt_of(7)) for session in (2, 3)]
        await asyncio.sleep(1.5)
        await bench.commit(writer, 64)
        committed_at = bench.now()
        await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
        await settled()
        assert bench.now() - committed_at == pytest.approx(PATIENCE_S)
        assert (bench.waiting_count, others[0].result().cached_tokens) == (1, 64)
        await bench.commit(writer, COLD_TOKENS)
        assert (await others[1]).cached_tokens == COLD_TOKENS
        bench.check()

    run_jumping(scenario)


def test_a_writer_that_says_that_it_is_at_work_is_waited_for() -> None:
    """[W7] Also by those who waited before it has said so; when it says nothing more, one of them takes over."""

    async def scenario() -> None:
        bench = Bench()
        writer = await bench.ask(1, prompt_of())
        others = [bench.ask(session, prompt_of(7)) for session in (2, 3)]
        for _ in range(10):
            await asyncio.sleep(PATIENCE_S * 0.9)
            bench.owner.call(lambda: bench.pool.note_computing(1))
        assert bench.waiting_count == 2
        await bench.commit(writer, 64)
        for _ in range(3):
            await asyncio.sleep(PATIENCE_S * 0.9)
            bench.owner.call(lambda: bench.pool.note_computing(1))
        said_at = bench.now()
        await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
        await settled()
        assert bench.now() - said_at == pytest.approx(PATIENCE_S)
        assert (bench.waiting_count, others[0].result().cached_tokens) == (1, 64)
        await bench.commit(writer, COLD_TOKENS)
        assert (await others[1]).cached_tokens == COLD_TOKENS
        bench.check()

    run_jumping(scenario)


def test_a_writer_that_only_says_so_is_not_waited_for_for_ever() -> None:
    """[W7] It may hang in its step: a minute after its last commit somebody takes over."""

    async def scenario() -> None:
        bench = Bench()
        writer = await bench.ask(1, prompt_of())
        began_at = bench.now()
        other = bench.ask(2, prompt_of(7), pending_wait_s=10 * LONGEST_STEP_S)
        while not other.done():
            bench.owner.call(lambda: bench.pool.note_computing(1))
            await asyncio.sleep(0.5)
        assert LONGEST_STEP_S <= bench.now() - began_at <= LONGEST_STEP_S + 0.5
        assert bench.pool.stats().counters.takeover_count == 1
        await bench.release(writer)
        bench.check()

    run_jumping(scenario)


def test_a_part_of_a_block_is_progress() -> None:
    """[W5] A slow writer that goes on is waited for, however large a block is."""

    async def scenario() -> None:
        bench = Bench()
        writer = await bench.ask(1, prompt_of(count=BLOCK_TOKENS))
        other = bench.ask(2, prompt_of(7, count=BLOCK_TOKENS))
        for computed in range(8, BLOCK_TOKENS + 1, 8):
            await asyncio.sleep(PATIENCE_S * 0.9)
            assert not other.done()
            await bench.commit(writer, computed)
        assert (await other).cached_tokens == BLOCK_TOKENS
        bench.check()

    run_jumping(scenario)


def test_two_engines_that_wait_crosswise_go_on() -> None:
    """[W5] Each has one thread, computes what the other waits for, and can do nothing while it waits."""

    async def scenario() -> None:
        bench = Bench()

        async def engine(session: int, own: Prompt, other: Prompt, done: asyncio.Barrier) -> None:
            computing = await bench.ask(session, own)
            await done.wait()
            waited_for = await bench.ask(session, other)
            await bench.commit(computing, computing.token_count)
            await bench.commit(waited_for, waited_for.token_count)

        prompts = (prompt_of(), prompt_of(first=500_000))
        barrier = asyncio.Barrier(2)
        await asyncio.gather(engine(1, *prompts, barrier), engine(2, *prompts[::-1], barrier))
        assert bench.now() - 1000.0 == pytest.approx(PATIENCE_S)
        bench.check()

    run_jumping(scenario)
