"""When a waiting Allocate is tried, how often, and what becomes of one whose caller has left meanwhile."""

import asyncio
import functools

import pytest

from admission_bench import BLOCK_TOKENS, Bench, commit_all
from kvharbor.pool import Commit, SequenceView
from kvharbor.pool.errors import PoolExhausted
from kvharbor.pool.steps import Steps, finish
from kvharbor.server.scheduling.applications import Application
from kvharbor.server.session_errors import SessionUnknown
from scenarios import DEADLINE_S, run, settled


def test_a_refused_try_is_not_repeated_before_something_has_changed() -> None:
    """A waiter whose prefix lies cached looks as if it fitted; trying it for ever would stop the service."""

    async def scenario() -> None:
        bench = Bench(4)
        prompt = bench.prompt(4)
        first = await bench.allocate(1, 4, prompt=prompt)
        commit_all(bench, first)
        await bench.release(first)
        await bench.allocate(1, 2)
        waiting = bench.allocate(2, 4, wait_s=60, prompt=prompt)
        await settled()
        refused_count = bench.pool.stats().counters.refused_count
        await settled()
        assert bench.pool.stats().counters.refused_count == refused_count <= 2
        waiting.cancel()

    run(scenario)


def test_others_are_served_while_a_crowd_of_waiters_is_answered() -> None:
    """One release may answer a thousand of them: each in a step of its own."""

    async def scenario() -> None:
        bench = Bench(block_count=100)
        holder = await bench.allocate(1, 100)
        waiters = [bench.allocate(2, 1, wait_s=DEADLINE_S) for _ in range(100)]
        while bench.admission.waiting_count < 100:
            await asyncio.sleep(0)
        await bench.release(holder)
        most_answered_at_once = answered = 0
        while answered < 100:
            await asyncio.sleep(0)
            now_answered = 100 - bench.admission.waiting_count
            most_answered_at_once = max(most_answered_at_once, now_answered - answered)
            answered = now_answered
        await asyncio.gather(*waiters)
        assert most_answered_at_once <= 2

    run(scenario)


def test_what_is_granted_to_one_who_has_left_is_given_back() -> None:
    """The try was under way when he left, or its answer had just come."""

    async def scenario() -> None:
        bench = Bench(4, slice_blocks=1)
        returned: list[SequenceView] = []
        held = await bench.allocate(1, 4)
        for steps_before in range(20):
            waiting = bench.allocate(2, 4, wait_s=60, give_back=returned.append)
            await settled()
            await bench.release(held)
            for _ in range(steps_before):
                await asyncio.sleep(0)
            waiting.cancel()
            outcome = (await asyncio.gather(waiting, return_exceptions=True))[0]
            await settled()
            held = outcome if isinstance(outcome, SequenceView) else await _all_of_it(bench, returned)
        assert bench.admission.waiting_count == 0

    run(scenario)


async def _all_of_it(bench: Bench, returned: list[SequenceView]) -> SequenceView:
    """Releases what was given back, and takes everything: so nothing else was granted."""
    for view in returned:
        await bench.release(view)
    returned.clear()
    return await bench.allocate(1, 4)


def test_at_the_end_of_all_waits_one_that_is_being_tried_is_answered_by_that() -> None:
    """It does not wait on: nobody would end it any more."""

    async def scenario() -> None:
        bench = Bench(2)
        held = await bench.allocate(1, 2)
        waiting = bench.allocate(2, 2, wait_s=60)
        await settled()
        assert bench.turns[2].try_take()
        await bench.release(held)
        await settled()
        finish(bench.pool.allocate(1, bench.prompt(1)))
        bench.admission.give_up_all(SessionUnknown())
        bench.turns[2].leave()
        with pytest.raises(PoolExhausted):
            await waiting

    run(scenario)


def test_who_needs_less_by_what_others_publish_is_tried_then() -> None:
    """Though no room has come: what they hold he may share. The next in line is, whoever commits."""

    async def scenario() -> None:
        bench = Bench(10)
        prompt = bench.prompt(6)
        other = await bench.allocate(1, 6, prompt=prompt)
        await bench.allocate(2, 1)
        waiting = bench.allocate(2, 6, wait_s=60, prompt=prompt)
        behind = bench.allocate(2, 5, wait_s=60)
        await settled()
        assert bench.admission.waiting_count == 2
        for computed_tokens in range(BLOCK_TOKENS, 6 * BLOCK_TOKENS, BLOCK_TOKENS):
            assert not waiting.done()
            commit = Commit(computed_tokens)
            await bench.owner.run(bench.turns[1], functools.partial(bench.pool.commit, 1, other.number, commit))
            await settled()
            if waiting.done():
                break
        assert (await waiting).cached_tokens == computed_tokens == 3 * BLOCK_TOKENS
        assert bench.admission.waiting_count == 1
        behind.cancel()

    run(scenario)


def test_one_who_still_does_not_fit_is_tried_once_for_each_commit() -> None:
    """And those behind him who fit are not kept waiting by it."""

    async def scenario() -> None:
        bench = Bench(10)
        busy = await bench.allocate(1, 6)
        tries = 0
        first = bench.prompt(9)

        def start() -> Steps[SequenceView]:
            nonlocal tries
            tries += 1
            return bench.pool.allocate(2, first)

        application = Application(bench.applicants[2], "a", bench.turns[2], start, 9)
        waiting = asyncio.create_task(bench.admission.allocate(application, 60))
        await settled()
        before = tries
        for count in range(1, 5):
            commit = Commit(count * BLOCK_TOKENS)
            await bench.owner.run(bench.turns[1], functools.partial(bench.pool.commit, 1, busy.number, commit))
            await settled()
            assert tries == before + count
        assert len((await bench.allocate(1, 3)).block_ids) == 3
        bench.now += 40  # nobody may pass him any more
        late = bench.allocate(2, 1, wait_s=60)
        await settled()
        assert (waiting.done(), late.done(), tries) == (False, False, before + 4)
        waiting.cancel()
        assert len((await late).block_ids) == 1

    run(scenario)
