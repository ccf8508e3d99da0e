"""A decode batch against a real service: what it leaves behind is what plain commits leave, whatever dies meanwhile."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest

from integration.client_worker import BLOCK_TOKENS, LAYOUT, pool_size, read
from kvharbor.client import (
    BlocksStored,
    Credits,
    DecodeBatch,
    Harbor,
    Pool,
    PoolExhausted,
    PoolStats,
    Progress,
    Sequence,
    Unavailable,
    connect,
)
from service_process import DEADLINE_S, ServiceProcess
from waiting import until

NAMES = itertools.count()
Tokens = npt.NDArray[np.uint32]


@pytest.fixture
def opened(harbor: str) -> Iterator[Harbor]:
    """A session of the shared service."""
    with connect(harbor) as session:
        yield session


def open_pool(session: Harbor, block_count: int) -> Pool:
    return session.open_pool(f"decoding-{next(NAMES)}", LAYOUT, pool_size(block_count))


def prompt(number: int, token_count: int) -> Tokens:
    return (np.arange(token_count) + 1000 * number).astype(np.uint32)


def write(pool: Pool, slots: tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]], tokens: Tokens) -> None:
    """Stamps each slot with its token."""
    for plane in LAYOUT.planes:
        for layer in range(plane.layer_count):
            pool.views.numpy(plane.name, layer)[slots] = tokens[:, None, None]


def prefilled(pool: Pool, tokens: Tokens) -> Sequence:
    """A sequence whose prompt is written and committed."""
    sequence = pool.allocate(tokens)
    cached = sequence.cached_tokens
    write(pool, sequence.slots(cached, len(tokens)), tokens[cached:])
    sequence.commit(len(tokens))
    return sequence


def digests(pool: Pool) -> set[bytes]:
    """The names of all that is in the index."""
    stored: set[bytes] = set()
    with pool.watch() as watch:
        for event in watch:
            if isinstance(event, BlocksStored):
                stored |= {*event.digests}
            elif isinstance(event, Progress):
                return stored
    raise AssertionError("the watch has ended")


def counted(stats: PoolStats) -> tuple[int, ...]:
    return (
        stats.free_block_count,
        stats.reserved_block_count,
        stats.active_block_count,
        stats.cached_block_count,
        stats.sequence_count,
        stats.counters.committed_block_count,
        stats.counters.shadow_block_count,
    )


def test_a_batch_leaves_what_plain_commits_leave(opened: Harbor) -> None:
    """G1, C20: the same blocks under the same names, the same counts, and the bytes that were written."""
    counts = (1, 7, 16, 17, 31, 32, 40, 48)
    new = np.arange(70 * len(counts)).reshape(70, -1).astype(np.uint32) + 50_000
    plain, batched = open_pool(opened, 200), open_pool(opened, 200)

    by_hand = [prefilled(plain, prompt(row, count)) for row, count in enumerate(counts)]
    for row, sequence in enumerate(by_hand):
        for token in new[:, row]:
            if sequence.token_count == sequence.capacity_tokens:
                sequence.extend(1)
            write(plain, sequence.slots(sequence.token_count, sequence.token_count + 1), np.array([token]))
            sequence.commit(sequence.token_count, [int(token)])

    credits = Credits(batched, 16)
    batch = DecodeBatch(batched, credits)
    made = [prefilled(batched, prompt(row, count)) for row, count in enumerate(counts)]
    for sequence in made:
        batch.join(sequence)
    for tokens in new:
        step = batch.step(tokens)
        assert not step.refused
        write(batched, step.slots, tokens)
    batch.sync()
    credits.close()
    until(lambda: not len(batched.own_blocks))

    assert counted(batched.stats()) == counted(plain.stats())
    assert digests(batched) == digests(plain)
    for row, (sequence, other) in enumerate(zip(made, by_hand, strict=True)):
        assert (sequence.token_count, sequence.computed_tokens) == (other.token_count, other.computed_tokens)
        assert (len(sequence.table), sequence.capacity_tokens) == (len(other.table), other.capacity_tokens)
        everything = [*prompt(row, counts[row]), *new[:, row]]
        assert read(batched, sequence, 0, sequence.token_count) == everything
        assert batched.lookup(everything).present_tokens == plain.lookup(everything).present_tokens
    for sequence in made:
        batch.leave(sequence)
        sequence.commit(sequence.token_count)
        sequence.release()
    for sequence in by_hand:
        sequence.commit(sequence.token_count)
        sequence.release()
    assert counted(batched.stats()) == counted(plain.stats())


def test_two_engines_that_decode_the_same_share_it_in_the_end(harbor: str) -> None:
    """The second one's blocks are shadows, which it may switch once it has left the batch."""
    with connect(harbor) as one, connect(harbor) as two:
        name = f"decoding-{next(NAMES)}"
        pools = [each.open_pool(name, LAYOUT, pool_size(64)) for each in (one, two)]
        credits = [Credits(pool, 4) for pool in pools]
        batches = [DecodeBatch(pool, stock) for pool, stock in zip(pools, credits, strict=True)]
        made = [pool.allocate(prompt(0, 8)) for pool in pools]
        for batch, sequence in zip(batches, made, strict=True):
            sequence.commit(8)
            batch.join(sequence)
            for number in range(50):
                assert not batch.step([number]).refused
            batch.leave(sequence)
        first, second = made
        assert first.shadows == ()
        assert [shadow.position for shadow in second.shadows] == [0, 1, 2]
        second.switch_shadows()
        second.commit(second.computed_tokens)
        assert second.table[:3].tolist() == first.table[:3].tolist()
        for sequence in made:
            sequence.release()
        for stock in credits:
            stock.close()


def test_two_batches_on_a_tight_pool_both_come_to_an_end(harbor: str) -> None:
    """What even one of them wants at once does not fit: rows are preempted, and computed again later; nobody stalls."""
    with connect(harbor) as one, connect(harbor) as two, ThreadPoolExecutor(2) as threads:
        name = f"decoding-{next(NAMES)}"
        pools = [each.open_pool(name, LAYOUT, pool_size(12)) for each in (one, two)]
        working = [threads.submit(_decode_all, pool, number) for number, pool in enumerate(pools)]
        preempted = [each.result(3 * DEADLINE_S) for each in working]
        assert sum(preempted) > 0
        for pool in pools:
            until(lambda pool=pool: not len(pool.own_blocks))  # type: ignore[misc]
        stats = pools[0].stats()
        assert (stats.sequence_count, stats.reserved_block_count, stats.active_block_count) == (0, 0, 0)


def _decode_all(pool: Pool, number: int) -> int:
    """Decodes six prompts of 8 to 60 tokens; returns how often one was preempted."""
    credits = Credits(pool, 4, idle_s=0.05)
    batch = DecodeBatch(pool, credits)
    waiting = [[*range(1000 * (6 * number + each), 1000 * (6 * number + each) + 8)] for each in range(6)]
    running: dict[str, list[int]] = {}
    preempted = 0
    while waiting or running:
        if waiting and len(running) < 4:
            tokens = waiting[0]
            try:
                sequence = pool.allocate(tokens, wait_s=0 if running else DEADLINE_S)
            except PoolExhausted:
                pass
            else:
                waiting.pop(0)
                sequence.commit(len(tokens))
                batch.join(sequence)
                running[sequence.id] = tokens
        if not running:
            continue
        order = batch.sequences
        step = batch.step([len(running[sequence.id]) for sequence in order])
        for row in step.rows.tolist():
            running[order[row].id].append(len(running[order[row].id]))
        for row, refusal in step.refused.items():
            assert isinstance(refusal, PoolExhausted), refusal
            waiting.append(running.pop(order[row].id))
            preempted += 1
        done = [sequence for sequence in order if len(running.get(sequence.id, ())) >= 60]
        for sequence in done:
            assert running.pop(sequence.id)[8:] == [*range(8, 60)]
        batch.release([*done, *(order[row] for row in step.refused)])
    credits.close()
    pool.blocks.flush()
    return preempted


# The death of the process


@pytest.mark.slow
def test_a_batch_goes_on_through_deaths_of_the_process(service: ServiceProcess) -> None:
    """G7, C20: sixteen sequences decode while it dies six times; every byte and every count is as if it had not."""
    row_count, step_count = 16, 400
    new = np.random.default_rng(7).integers(0, 1000, (step_count, row_count)).astype(np.uint32)
    with connect(service.target, timeout_s=DEADLINE_S) as session:
        pool = session.open_pool("p", LAYOUT, pool_size(800))
        credits = Credits(pool, 48)
        batch = DecodeBatch(pool, credits)
        made = [prefilled(pool, prompt(row, 5 + 3 * row)) for row in range(row_count)]
        for sequence in made:
            batch.join(sequence)
        stepped = np.zeros(row_count, np.int64)
        kill_count = 0
        while stepped.max() < step_count:
            if kill_count < 6 and stepped.min() >= 50 * (kill_count + 1):
                service.wait_for("ready", kill_count + 1)
                service.kill_child()
                kill_count += 1
            tokens = new[stepped, range(row_count)]
            step = batch.step(tokens)
            write(pool, step.slots, tokens[step.rows])
            stepped[step.rows] += 1
            assert [error for error in step.refused.values() if not isinstance(error, Unavailable)] == []
        batch.sync()
        for row, sequence in enumerate(made):
            everything = [*prompt(row, 5 + 3 * row), *new[: stepped[row], row]]
            assert sequence.token_count == len(everything)
            assert read(pool, sequence, 0, len(everything)) == everything
            whole = sequence.computed_tokens // BLOCK_TOKENS * BLOCK_TOKENS
            assert pool.lookup(everything).present_tokens == whole
        batch.release(made[:8])
        for sequence in made[8:]:
            sequence.release()
        credits.close()
        until(lambda: not len(pool.own_blocks))
        pool.blocks.flush()
        stats = pool.stats()
        assert (stats.sequence_count, stats.reserved_block_count, stats.active_block_count) == (0, 0, 0)
