"""Single flight: a cold prompt is computed once, whoever asks for it, and nobody waits longer than he must [S30]."""

import asyncio
import functools
from array import array
from dataclasses import dataclass

import pytest

from jumping_loop import run_jumping
from kvharbor.pool import Commit, Pool, PoolConfig, Prompt, SequenceView
from kvharbor.pool.errors import PoolExhausted
from kvharbor.pool.steps import Steps, finish
from kvharbor.pool.writers import LONGEST_STEP_S, PATIENCE_S
from kvharbor.server.admission import Admission, Granted
from kvharbor.server.applications import Application, Patience
from kvharbor.server.event_log import EventLog
from kvharbor.server.owner import PoolOwner
from kvharbor.server.session_errors import SessionUnknown
from kvharbor.server.turns import Turns

BLOCK_TOKENS = 64
COLD_TOKENS = 4096
MINUTE_S = 60.0


@dataclass
class Applicant:
    """A session, as far as waiting is concerned."""

    number: int
    ended: bool = False


class Bench:
    """A pool with its owner and admission, and sessions of one tenant, on the loop's clock."""

    def __init__(self, block_count: int = 10_000, session_count: int = 4, slice_blocks: int = 512) -> None:
        config = PoolConfig(block_count=block_count, block_tokens=BLOCK_TOKENS, slice_blocks=slice_blocks)
        self.pool = Pool(config)
        self.crashes: list[BaseException] = []
        self.owner = PoolOwner(self.pool, EventLog(1 << 20), self.now, self.crashes.append)
        self.admission = Admission(self.owner)
        self.turns = {number: Turns() for number in range(1, session_count + 1)}
        self.applicants = {number: Applicant(number) for number in self.turns}
        for number in self.turns:
            self.pool.open_session(number, "tenant")

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def waiting_count(self) -> int:
        return self.admission.single_flight.waiting_count

    def ask(
        self,
        session: int,
        prompt: Prompt,
        *,
        pending_wait_s: float = MINUTE_S,
        wait_s: float = 0.0,
        patience: Patience | None = None,
    ) -> "asyncio.Task[SequenceView]":
        """Starts an Allocate that lets others finish what they compute."""

        def start() -> Steps[SequenceView]:
            return self.pool.allocate(session, prompt)

        def unless_pending() -> Steps[Granted]:
            return self.pool.allocate_unless_pending(session, prompt)

        block_count = -(-len(prompt.token_ids) // (4 * BLOCK_TOKENS))
        application = Application(
            self.applicants[session],
            "tenant",
            self.turns[session],
            start,
            block_count,
            patience=patience or Patience(),
        )
        return asyncio.create_task(
            self.admission.allocate_after_others(application, unless_pending, wait_s, pending_wait_s)
        )

    async def commit(self, view: SequenceView, computed_tokens: int) -> None:
        """Commits a sequence up to a token."""
        asked = Commit(computed_tokens)
        await self.owner.run(self.turns[view.session], lambda: self.pool.commit(view.session, view.number, asked))

    async def release(self, view: SequenceView) -> None:
        """Ends a sequence."""
        await self.owner.run(self.turns[view.session], lambda: self.pool.release(view.session, view.number))

    async def lose(self, session: int) -> None:
        """Ends a session as the service does when its process is gone."""
        self.applicants[session].ended = True
        self.admission.give_up(self.applicants[session], SessionUnknown())
        await self.owner.run(self.turns[session], lambda: self.pool.end_session(session))

    def check(self) -> None:
        """[W1] to [W6] hold, nobody is left waiting, and the process has not ended for an error."""
        self.pool.check_invariants()
        assert (self.waiting_count, self.pool._state.awaiting.by_key, self.crashes) == (0, {}, [])


def prompt_of(*tokens: int, first: int = 1, count: int = COLD_TOKENS) -> Prompt:
    """A prompt of consecutive token ids, then `tokens`."""
    return Prompt(array("I", [*range(first, first + count), *tokens]).tobytes())


async def settled() -> None:
    """Lets everything run that can run now."""
    for _ in range(300):
        await asyncio.sleep(0)


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
