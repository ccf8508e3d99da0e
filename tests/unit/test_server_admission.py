"""Allocates that wait: in order, holding nothing, and always answered."""

import asyncio
import functools
import itertools
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest

from kvharbor.pool import Commit, Pool, PoolConfig, Prompt, SequenceView
from kvharbor.pool.errors import PoolExhausted, RequestTooLarge
from kvharbor.pool.steps import Steps, finish
from kvharbor.server.admission import Admission
from kvharbor.server.applications import Application, Patience
from kvharbor.server.event_log import EventLog
from kvharbor.server.owner import PoolOwner
from kvharbor.server.session_errors import SessionUnknown
from kvharbor.server.turns import Turns

BLOCK_TOKENS = 16
DEADLINE_S = 10.0


@dataclass
class Applicant:
    """A session, as far as waiting is concerned."""

    number: int
    ended: bool = False


class Bench:
    """A pool of so many blocks with its owner and admission, on a clock that the test sets."""

    def __init__(self, block_count: int, sessions: int = 3, guaranteed_count: int = 0, slice_blocks: int = 512) -> None:
        self.now = 1000.0
        self.pool = Pool(PoolConfig(block_count=block_count, block_tokens=BLOCK_TOKENS, slice_blocks=slice_blocks))
        self.crashes: list[BaseException] = []
        self.owner = PoolOwner(self.pool, EventLog(1 << 20), lambda: self.now, self.crashes.append)
        self.admission = Admission(self.owner, guarantee=lambda: guaranteed_count)
        self.turns = {number: Turns() for number in range(1, sessions + 1)}
        self.applicants = {number: Applicant(number) for number in self.turns}
        for number in self.turns:
            self.pool.open_session(number, self.tenant(number))
        self._fresh = itertools.count(1)

    def tenant(self, session: int) -> str:
        """Sessions 1 and 2 are of one tenant."""
        return "a" if session < 3 else "b"

    def prompt(self, block_count: int) -> Prompt:
        """Returns a prompt of tokens that were never seen."""
        token = next(self._fresh)
        return Prompt(array("I", [token] * (block_count * BLOCK_TOKENS)).tobytes())

    def allocate(
        self,
        session: int,
        block_count: int,
        wait_s: float = 0.0,
        prompt: Prompt | None = None,
        patience: Patience | None = None,
        give_back: Callable[[SequenceView], None] = lambda _: None,
        estimated: int | None = None,
    ) -> "asyncio.Task[SequenceView]":
        """Starts an Allocate of fresh blocks."""
        asked = prompt or self.prompt(block_count)

        def start() -> Steps[SequenceView]:
            return self.pool.allocate(session, asked)

        application = Application(
            self.applicants[session],
            self.tenant(session),
            self.turns[session],
            start,
            block_count,
            None if estimated is None else lambda: _known(estimated),
            patience=patience or Patience(),
            give_back=give_back,
        )
        return asyncio.create_task(self.admission.allocate(application, wait_s))

    async def release(self, view: SequenceView) -> None:
        """Ends a sequence."""
        await self.owner.run(self.turns[view.session], lambda: self.pool.release(view.session, view.number))


def _known(block_count: int) -> Steps[int]:
    yield from ()
    return block_count


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    """Runs a scenario with a deadline."""

    async def limited() -> None:
        await asyncio.wait_for(scenario(), DEADLINE_S)

    asyncio.run(limited())


async def settled() -> None:
    """Lets everything run that can run now."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_waiter_is_answered_when_room_comes() -> None:
    """And nobody waits after that."""

    async def scenario() -> None:
        bench = Bench(4)
        held = await bench.allocate(1, 4)
        waiting = bench.allocate(3, 2, wait_s=60)
        await settled()
        assert bench.admission.waiting_count == 1
        await bench.release(held)
        assert len((await waiting).block_ids) == 2
        assert bench.admission.waiting_count == 0

    run(scenario)


def test_without_a_wait_the_refusal_comes_at_once() -> None:
    """With the numbers of now."""

    async def scenario() -> None:
        bench = Bench(4)
        await bench.allocate(1, 3)
        with pytest.raises(PoolExhausted) as refused:
            await bench.allocate(2, 2)
        assert refused.value.metadata()["availableBlockCount"] == "1"
        assert bench.admission.waiting_count == 0

    run(scenario)


def test_a_wait_ends_with_the_refusal_when_its_time_is_over() -> None:
    """The real clock ends it, and it leaves the queue."""

    async def scenario() -> None:
        bench = Bench(2)
        await bench.allocate(1, 2)
        with pytest.raises(PoolExhausted):
            await bench.allocate(2, 1, wait_s=0.01)
        assert bench.admission.waiting_count == 0

    run(scenario)


def test_equal_waiters_are_served_in_order_of_arrival() -> None:
    """One block at a time comes back, and goes to who has waited longest."""

    async def scenario() -> None:
        bench = Bench(2)
        held = [await bench.allocate(1, 1), await bench.allocate(1, 1)]
        order: list[int] = []
        waiting = [bench.allocate(2, 1, wait_s=60) for _ in range(2)]
        for index, task in enumerate(waiting):
            task.add_done_callback(functools.partial(_note, order, index))
        await settled()
        for view in held:
            await bench.release(view)
            await settled()
        await asyncio.gather(*waiting)
        assert order == [0, 1]

    run(scenario)


def test_nobody_passes_a_head_that_has_waited_half_its_time() -> None:
    """Before that a small request gets by; after it the room gathers for the head."""

    async def scenario() -> None:
        bench = Bench(4)
        held = [await bench.allocate(1, 1) for _ in range(4)]
        head = bench.allocate(2, 4, wait_s=60)
        await settled()
        await bench.release(held.pop())
        await bench.release(await bench.allocate(1, 1))
        bench.now += 31
        with pytest.raises(PoolExhausted):
            await bench.allocate(1, 1)
        other_tenant = await bench.allocate(3, 1)
        await bench.release(other_tenant)
        late = bench.allocate(1, 1, wait_s=60)
        await settled()
        assert not late.done()
        for view in held:
            await bench.release(view)
        await bench.release(await head)
        assert len((await late).block_ids) == 1

    run(scenario)


def test_what_can_never_fit_is_not_queued() -> None:
    """Not even behind an impatient head."""

    async def scenario() -> None:
        bench = Bench(2)
        await bench.allocate(1, 2)
        bench.allocate(2, 2, wait_s=60)
        await settled()
        bench.now += 59
        with pytest.raises(RequestTooLarge):
            await bench.allocate(1, 3, wait_s=60)
        bench.admission.give_up_all(SessionUnknown())

    run(scenario)


def test_a_caller_that_leaves_makes_way() -> None:
    """Its ticket is gone, and who was behind it is tried."""

    async def scenario() -> None:
        bench = Bench(4)
        held = [await bench.allocate(1, 2), await bench.allocate(1, 2)]
        head = bench.allocate(2, 4, wait_s=60)
        await settled()
        bench.now += 31
        behind = bench.allocate(2, 2, wait_s=60)
        await settled()
        await bench.release(held[0])
        await settled()
        assert not behind.done()
        head.cancel()
        assert len((await behind).block_ids) == 2

    run(scenario)


def test_the_end_of_its_session_ends_a_wait() -> None:
    """And the pool is not asked for a session that is gone."""

    async def scenario() -> None:
        bench = Bench(2)
        held = await bench.allocate(1, 2)
        waiting = bench.allocate(2, 1, wait_s=60)
        await settled()
        bench.applicants[2].ended = True
        bench.admission.give_up(bench.applicants[2], SessionUnknown())
        finish(bench.pool.end_session(2))
        finish(bench.pool.session_quiet(2))
        await bench.release(held)
        with pytest.raises(SessionUnknown):
            await waiting
        assert bench.crashes == []

    run(scenario)


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


def _note(order: list[int], index: int, _: object) -> None:
    order.append(index)


def commit_all(bench: Bench, view: SequenceView) -> None:
    """Commits all tokens of a sequence."""
    finish(bench.pool.commit(view.session, view.number, Commit(computed_tokens=view.token_count)))


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


def test_who_has_less_than_is_guaranteed_is_served_first() -> None:
    """Before one who came earlier and would fit, and who has his share; that one follows."""

    async def scenario() -> None:
        bench = Bench(8, guaranteed_count=2)
        held = [await bench.allocate(1, 2) for _ in range(4)]
        rich = bench.allocate(1, 1, wait_s=60)
        await settled()
        poor = bench.allocate(2, 4, wait_s=60)
        await settled()
        await bench.release(held[0])
        await settled()
        assert (rich.done(), poor.done()) == (False, False)
        with pytest.raises(PoolExhausted):
            await bench.allocate(1, 1)
        await bench.release(held[1])
        assert len((await poor).block_ids) == 4
        assert not rich.done()
        await bench.release(held[2])
        assert len((await rich).block_ids) == 1

    run(scenario)


def test_a_first_claim_is_one_as_long_as_its_session_is_poor() -> None:
    """Once that has its share by other means, it waits as everybody."""

    async def scenario() -> None:
        bench = Bench(8, guaranteed_count=2)
        held = [await bench.allocate(1, 2) for _ in range(3)]
        poor = bench.allocate(2, 4, wait_s=60)
        await settled()
        with pytest.raises(PoolExhausted):
            await bench.allocate(1, 2)
        grown = await bench.owner.run(bench.turns[2], lambda: bench.pool.allocate(2, bench.prompt(2)))
        await bench.release(held[0])
        assert len((await bench.allocate(1, 2)).block_ids) == 2
        assert grown.capacity_tokens == 2 * BLOCK_TOKENS
        poor.cancel()

    run(scenario)


def test_who_lacks_room_is_made_known() -> None:
    """With the blocks that he lacks: refused at once, or waiting."""

    async def scenario() -> None:
        bench = Bench(4)
        wanted: list[tuple[int, int]] = []
        bench.admission.wanted = lambda applicant, block_count: wanted.append((applicant.number, block_count))
        await bench.allocate(1, 3)
        with pytest.raises(PoolExhausted):
            await bench.allocate(2, 3)
        waiting = bench.allocate(3, 2, wait_s=60)
        await settled()
        assert wanted == [(2, 2), (3, 1)]
        assert [(applicant.number, lacking) for applicant, lacking in bench.admission.waiting()] == [(3, 1)]
        assert (bench.admission.wait_count, bench.admission.waiting_count) == (1, 1)
        waiting.cancel()

    run(scenario)


def test_an_end_of_patience_ends_a_wait_as_its_time_does() -> None:
    """Before or while it waits, with the refusal; a grant that has come is not taken back."""

    async def scenario() -> None:
        bench = Bench(2)
        held = await bench.allocate(1, 2)
        patience = Patience()
        waiting = bench.allocate(2, 1, wait_s=60, patience=patience)
        await settled()
        patience.end()
        with pytest.raises(PoolExhausted):
            await waiting
        with pytest.raises(PoolExhausted):
            await bench.allocate(2, 1, wait_s=60, patience=patience)
        patience = Patience()
        waiting = bench.allocate(2, 1, wait_s=60, patience=patience)
        await settled()
        await bench.release(held)
        await settled()
        patience.end()
        assert len((await waiting).block_ids) == 1

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


def test_nobody_is_served_before_a_first_claim_that_only_looked_as_if_it_fitted() -> None:
    """What it would find is cached, and no room for the rest; others with more than their share do not profit."""

    async def scenario() -> None:
        bench = Bench(6, guaranteed_count=1)
        prefix = bench.prompt(2)
        first = await bench.allocate(1, 2, prompt=prefix)
        commit_all(bench, first)
        await bench.release(first)
        held = [await bench.allocate(1, 1) for _ in range(3)]
        head = bench.allocate(2, 6, wait_s=60)
        await settled()
        bench.now += 31
        longer = Prompt(prefix.token_ids + bench.prompt(2).token_ids)
        behind = bench.allocate(2, 4, wait_s=60, prompt=longer, estimated=2)
        rich = bench.allocate(1, 1, wait_s=60)
        await settled()
        head.cancel()
        await settled()
        assert (behind.done(), rich.done()) == (False, False)
        await bench.release(held[0])
        assert (await behind).cached_tokens == 2 * BLOCK_TOKENS
        rich.cancel()

    run(scenario)


def test_an_end_of_patience_before_the_wait_has_begun_counts_too() -> None:
    """The request still waits for its session's turn; then it is tried once."""

    async def scenario() -> None:
        bench = Bench(2)
        await bench.allocate(1, 2)
        patience = Patience()
        assert bench.turns[2].try_take()
        waiting = bench.allocate(2, 1, wait_s=60, patience=patience)
        await settled()
        patience.end()
        bench.turns[2].leave()
        with pytest.raises(PoolExhausted):
            await waiting

    run(scenario)


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
