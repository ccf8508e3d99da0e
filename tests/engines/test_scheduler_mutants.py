"""What keeps engines from harming each other, taken away one by one: the churn has to notice."""

from typing import Any

import pytest

from engines.churn import Churn
from engines.scheduler_world import ContentWrong, Engine, HandedBackTooEarly, Mutation
from kvharbor.client import BlockNotHeld, BlockRun, PoolExhausted

pytestmark = pytest.mark.timeout(300)

SEEDS = range(1, 6)
KINDS = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


def caught(mutate: Mutation, *, asynchronous: bool, **options: Any) -> BaseException | None:
    """Returns what the churn ends with when each scheduler is broken so; None if nothing is noticed."""
    for seed in SEEDS:
        churn = Churn(asynchronous=asynchronous, seed=seed, family_count=1, mutate=mutate, **options)
        try:
            churn.run()
            churn.check()
        except Exception as noticed:
            return noticed
    return None


def publishes_when_it_schedules(scheduler: Any) -> None:
    publication, scheduled = scheduler._publication, scheduler._publication.scheduled

    def at_once(output: Any) -> None:
        scheduled(output)
        publication.has_run(output)

    publication.scheduled = at_once


def fences_no_frees(scheduler: Any) -> None:
    scheduler.defer_block_free = False


def holds_no_hits(scheduler: Any) -> None:
    """What is found is used, but given back at once."""
    calls, acquire = scheduler._calls, scheduler._calls.acquire

    def found(chains: Any, **keywords: Any) -> Any:
        results = acquire(chains, **keywords)
        for result in results:
            calls.release(result.held)
        return results

    calls.acquire = found


def keeps_hashes_of_what_is_not_computed(scheduler: Any) -> None:
    """What a request of less priority was to fill in a step is published with it, though it has lost its place."""
    pool = scheduler._pool
    pool.withdraw = lambda filled: pool.filled.append(filled)


def forgets_nothing_at_a_reset(scheduler: Any) -> None:
    """Requests that run on go on publishing, below blocks of the old version."""
    pool, outdate = scheduler._pool, scheduler._pool.outdate
    pool.outdate = lambda _: outdate([])


def frees_blocks_that_are_not_published_yet(scheduler: Any) -> None:
    scheduler._pool.is_published = lambda _: True


def race(*, asynchronous: bool, mutate: Mutation | None = None) -> tuple[int, int]:
    """One engine asks what another is computing: returns what it reuses, and what a third request does afterwards."""
    churn = Churn(asynchronous=asynchronous, seed=1, mutate=mutate)
    first, second = churn.engines
    tokens = [*range(246)]
    churn.ask("computes", first, tokens, 4)
    for _ in range(3):
        first.step()
    step = first.schedule()
    assert step.rows[0].end == len(tokens)
    churn.ask("meanwhile", second, tokens, 4)
    second.step()
    first.update()
    churn.ask("afterwards", second, tokens, 4)
    churn.drain()
    churn.check()
    return second.cached["meanwhile"], second.cached["afterwards"]


@KINDS
def test_a_block_is_a_hit_from_the_end_of_its_step_on(asynchronous: bool) -> None:
    """The last step of a prompt in chunks of 64 tokens is under way: its blocks are no hits yet, those before are."""
    assert race(asynchronous=asynchronous) == (192, 240)


@KINDS
def test_publishing_when_a_step_is_scheduled(asynchronous: bool) -> None:
    """Others hit what is not written yet."""
    with pytest.raises(ContentWrong):
        race(asynchronous=asynchronous, mutate=publishes_when_it_schedules)


@KINDS
def test_freeing_while_a_step_is_under_way(asynchronous: bool) -> None:
    """Blocks go back that a step still writes to, or that are still to be published."""
    assert isinstance(caught(fences_no_frees, asynchronous=asynchronous), HandedBackTooEarly | BlockNotHeld)


def go_on_with_other_weights(*, asynchronous: bool, mutate: Mutation | None = None) -> None:
    """A prompt is half computed when the weights change, goes on, and is then asked twice more."""
    churn = Churn(asynchronous=asynchronous, seed=1, mutate=mutate)
    engine, _ = churn.engines
    tokens = [*range(246)]
    churn.ask("before", engine, tokens, 9)
    churn.aborted.add("before")  # its answer is of both
    engine.step()
    engine.take_weights(1, preempt=False)
    for _ in range(3):
        engine.step()
    churn.ask("after", engine, tokens, 4)
    for _ in range(2):
        engine.step()
    churn.ask("after that", engine, tokens, 4)
    churn.drain()
    churn.check()


@KINDS
def test_what_began_before_a_reset_is_no_hit(asynchronous: bool) -> None:
    """Though it is the same prompt, and blocks of it have filled up since."""
    go_on_with_other_weights(asynchronous=asynchronous)


def reset_in_a_step(*, asynchronous: bool, mutate: Mutation | None = None) -> None:
    """The weights change while a step is under way, and its prompt is then asked once more."""
    churn = Churn(asynchronous=asynchronous, seed=1, mutate=mutate)
    engine, _ = churn.engines
    tokens = [*range(246)]
    churn.ask("before", engine, tokens, 9)
    churn.aborted.add("before")  # its answer is of both
    engine.schedule()
    engine.take_weights(1, preempt=False)
    engine.update()
    churn.ask("after", engine, tokens, 4)
    churn.drain()
    churn.check()
    assert engine.cached["after"] == 0


@KINDS
def test_what_is_under_way_at_a_reset_is_no_hit(asynchronous: bool) -> None:
    """It was scheduled with the weights of before."""
    reset_in_a_step(asynchronous=asynchronous)


def publishes_what_was_under_way(scheduler: Any) -> None:
    scheduler._publication.forget = scheduler._publication._announced.abandon_all


@KINDS
def test_publishing_after_a_reset_what_was_under_way(asynchronous: bool) -> None:
    """KV of other weights is hit."""
    with pytest.raises((ContentWrong, BlockNotHeld)):
        reset_in_a_step(asynchronous=asynchronous, mutate=publishes_what_was_under_way)


@KINDS
def test_publishing_after_a_reset_what_began_before_it(asynchronous: bool) -> None:
    """KV of other weights is hit."""
    with pytest.raises(ContentWrong):
        go_on_with_other_weights(asynchronous=asynchronous, mutate=forgets_nothing_at_a_reset)


def test_hits_that_are_not_held() -> None:
    """Somebody else gets the block."""
    assert caught(holds_no_hits, asynchronous=False) is not None


def lose_place(*, asynchronous: bool, mutate: Mutation | None = None) -> Engine:
    """A prompt is scheduled, and in the same step it has to give way to one of higher priority that needs a block."""
    churn = Churn(asynchronous=asynchronous, seed=1, block_count=20, policy="priority", mutate=mutate, chunk_tokens=48)
    engine, other = churn.engines
    other.depth = 0
    churn.ask("gives-way", engine, [*range(240)], 4, priority=2)
    engine.step()
    churn.ask("comes-first", engine, [*range(300, 314)], 8, priority=0)
    for _ in range(3):
        engine.step()
        # Somebody takes all that there is, and asks for more.
        other.calls.lease(0, 20, growth=True)
        with pytest.raises(PoolExhausted):
            other.calls.lease(1, 1)
    engine.step()
    other.calls.release(BlockRun.of((block.number, block.generation) for block in other.calls.direct))
    churn.drain()
    churn.check()
    return engine


def test_what_lost_its_place_in_a_step_is_not_published() -> None:
    """Both are answered as without a cache."""
    assert lose_place(asynchronous=False).preempted_count == 1


def test_publishing_what_lost_its_place_in_a_step() -> None:
    """Its blocks were never written."""
    with pytest.raises((BlockNotHeld, AssertionError)):
        lose_place(asynchronous=False, mutate=keeps_hashes_of_what_is_not_computed)


def test_freeing_what_is_not_published_yet() -> None:
    """The service is told of blocks that have gone back."""
    with pytest.raises((BlockNotHeld, AssertionError, KeyError)):
        lose_place(asynchronous=False, mutate=frees_blocks_that_are_not_published_yet)


def fill_up(churn: Churn) -> None:
    """Small requests first, then large ones of both engines, which each fit alone only."""
    for number in range(6):
        for engine in churn.engines:
            churn.ask(f"{engine.name}-small{number}", engine, [number, ord(engine.name)] * 20, 8 * number + 1)
    for number in range(3):
        for engine in churn.engines:
            churn.ask(f"{engine.name}-large{number}", engine, [100 + number, ord(engine.name)] * 115, 4)
    churn.drain(1000)
    churn.check()


def takes_what_there_is(scheduler: Any) -> None:
    """A request that does not fit takes what there is, keeps it, and waits for the rest."""
    calls, acquire, room = scheduler._calls, scheduler._calls.acquire, scheduler._room

    def in_part(chains: Any, **_: Any) -> Any:
        results = acquire(chains)
        for index, result in enumerate(results):
            if isinstance(result.refusal, PoolExhausted):
                part = calls.lease(0, chains[index].table_block_count, growth=True).blocks
                results[index] = type(result)(leased=part)
        return results

    def keeps_what_it_gets(count: int, *, growth: bool) -> bool:
        if count > room.free_count:
            scheduler._pool.lend(calls.lease(0, count - room.free_count, growth=True).blocks)
        return True

    calls.acquire = in_part
    room.require = keeps_what_it_gets


@KINDS
def test_large_requests_of_two_engines_do_not_starve(asynchronous: bool) -> None:
    """In a pool of 20 blocks, of which one request needs 15."""
    fill_up(Churn(asynchronous=asynchronous, seed=1, block_count=20))


def test_room_in_parts() -> None:
    """Each engine keeps what the other needs."""
    with pytest.raises(AssertionError, match="there are still"):
        fill_up(Churn(asynchronous=False, seed=1, block_count=20, mutate=takes_what_there_is))
