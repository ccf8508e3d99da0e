"""A service at the sizes that it promises: blocks, tokens, sequences and sessions by the number, over its sockets."""

from array import array
from contextlib import ExitStack
from statistics import median
from time import perf_counter

import pytest

from conftest import StartService
from kvharbor.client import BlocksStored, Commit, CommitResult, Harbor, Pool, Sequence, connect
from kvharbor.gpumem import DataType, Layout

pytestmark = pytest.mark.slow

BLOCK_TOKENS = 16
PROMPT_TOKENS = 1 << 20
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
# As small as blocks can be: it is the bookkeeping that is large here.
LAYOUT = Layout.attention(
    "size", layers=1, kv_heads=1, head_dim=2, data_type=DataType.FLOAT16, block_tokens=BLOCK_TOKENS
)


def open_pool(harbor: Harbor, name: str, block_count: int) -> Pool:
    """Opens a pool with so many usable blocks."""
    return harbor.open_pool(name, LAYOUT, LAYOUT.block_bytes * (block_count + LAYOUT.scratch_blocks))


def tokens(first: int, count: int) -> bytes:
    """So many consecutive ids."""
    return array("I", range(first, first + count)).tobytes()


def cache(pool: Pool, token_ids: bytes) -> None:
    """Leaves a prompt in the pool, held by nobody."""
    with pool.allocate(token_ids) as sequence:
        sequence.commit(len(token_ids) // 4)


def digests(pool: Pool, count: int) -> list[bytes]:
    """Returns the digests of the pool's one chain, in order."""
    found: list[bytes] = []
    with pool.watch() as watch:
        for event in watch:
            if isinstance(event, BlocksStored):
                found += event.digests
            if len(found) == count:
                break
    return found


def small_s(pool: Pool, first: int) -> float:
    """Returns the seconds of a cold prompt of 32 tokens, evictions and all."""
    began = perf_counter()
    cache(pool, tokens(first, 32))
    return perf_counter() - began


def test_a_million_blocks_are_filled_found_and_evicted_one_by_one(start_fresh: StartService) -> None:
    """G9: every block is in use and found again, and a call costs what it does in a pool of a thousand."""
    service = start_fresh(memory="256MiB")
    block_count = 1_000_000
    with connect(service.target, timeout_s=30) as harbor:
        large, small = open_pool(harbor, "large", block_count), open_pool(harbor, "small", 1_000)
        cache(small, tokens(0, 1_000 * BLOCK_TOKENS))
        for first in range(0, block_count, PROMPT_BLOCKS):
            blocks = min(PROMPT_BLOCKS, block_count - first)
            cache(large, tokens(first * BLOCK_TOKENS, blocks * BLOCK_TOKENS))
        stats = large.stats()
        assert (stats.cached_block_count, stats.free_block_count) == (block_count, 0)
        assert stats.counters.evicted_block_count == 0
        with large.allocate(tokens(0, PROMPT_TOKENS), max_cached_tokens=PROMPT_TOKENS) as oldest:
            assert oldest.cached_tokens == PROMPT_TOKENS

        taken = [(small_s(small, first), small_s(large, first)) for first in range(1 << 30, (1 << 30) + 6_400, 32)]
        stats = large.stats()
        assert (stats.cached_block_count, stats.counters.evicted_block_count) == (block_count, 400)
        in_small, in_large = (median(column) for column in zip(*taken, strict=True))
        assert in_large <= 2 * in_small


def test_a_million_tokens_in_pieces_are_those_in_one_message(start_fresh: StartService) -> None:
    """K1, L2: digest by digest, whether they come with one Allocate or one Commit at a time; both find the other's."""
    service = start_fresh()
    piece = PROMPT_TOKENS // 16
    with connect(service.target) as harbor:
        whole, pieces = (open_pool(harbor, name, PROMPT_BLOCKS) for name in ("whole", "pieces"))
        cache(whole, tokens(0, PROMPT_TOKENS))
        with pieces.allocate(tokens(0, piece), max_cached_tokens=0) as sequence:
            sequence.commit(piece)
            for first in range(piece, PROMPT_TOKENS, piece):
                sequence.extend(piece)
                sequence.commit(first + piece, tokens(first, piece))
        expected = digests(whole, PROMPT_BLOCKS)
        assert digests(pieces, PROMPT_BLOCKS) == expected
        assert len(set(expected)) == PROMPT_BLOCKS
        for pool in (whole, pieces):
            assert pool.lookup(tokens(0, PROMPT_TOKENS)).present_tokens == PROMPT_TOKENS


def committed(pool: Pool, commits: list[Commit[Sequence]]) -> list[int]:
    """Commits in batches; returns each one's committed tokens."""
    results: list[int] = []
    for first in range(0, len(commits), 5_000):
        for result in pool.commit_many(commits[first : first + 5_000]):
            assert isinstance(result, CommitResult), result
            results.append(result.committed_tokens)
    return results


def test_ten_thousand_sequences_live_at_once_and_outlive_the_process(start_fresh: StartService) -> None:
    """G7: each takes a step, and another after the service's process was replaced; then one call ends them all."""
    service = start_fresh()
    with connect(service.target, timeout_s=30) as harbor:
        pool = open_pool(harbor, "sequences", 20_400)
        sequences = []
        for number in range(100):
            first = pool.allocate(tokens(number * 1_000, BLOCK_TOKENS), reserve_tokens=32, group="g")
            first.commit(BLOCK_TOKENS)
            sequences += [first, *first.fork(99, reserve_tokens=32, group="g")]
        assert pool.stats().sequence_count == len(sequences) == 10_000

        step = [tokens(10_000_000 + BLOCK_TOKENS * at, BLOCK_TOKENS) for at in range(len(sequences))]
        after = 2 * BLOCK_TOKENS
        done = committed(pool, [Commit(one, after, new) for one, new in zip(sequences, step, strict=True)])
        assert done == [after] * len(sequences)
        service.restart_child()
        done = committed(pool, [Commit(one, after + 1, tokens(1, 1)) for one in sequences])
        assert done == [after] * len(sequences)
        stats = pool.stats()
        assert (stats.sequence_count, stats.active_block_count, stats.shared_block_count) == (10_000, 10_100, 100)
        assert pool.release(group="g") == 10_000
        stats = pool.stats()
        assert (stats.sequence_count, stats.active_block_count, stats.reserved_block_count) == (0, 0, 0)


def test_two_hundred_and_fifty_six_sessions_share_a_pool(start_fresh: StartService) -> None:
    """G6, G7: each holds the same prefix and a block of its own, before and after the service's process is replaced."""
    service = start_fresh()
    count, prefix = 256, tokens(0, 4 * BLOCK_TOKENS)
    with ExitStack() as stack:
        harbors = [stack.enter_context(connect(service.target, timeout_s=30)) for _ in range(count)]
        pools = [open_pool(harbor, "shared", 4 + 2 * count) for harbor in harbors]
        cache(pools[0], prefix)
        held = [
            pool.allocate(prefix + tokens(1_000 + number, 1), reserve_tokens=BLOCK_TOKENS)
            for number, pool in enumerate(pools)
        ]
        assert {sequence.cached_tokens for sequence in held} == {4 * BLOCK_TOKENS}
        assert len({block for sequence in held for block in sequence.table.tolist()}) == 4 + 2 * count
        service.restart_child()
        for pool in pools:
            pool.stats()  # it waits until its session has resumed; a commit would not
        for number, sequence in enumerate(held):
            own = tokens(2_000 + BLOCK_TOKENS * number, BLOCK_TOKENS - 1)
            assert sequence.commit(5 * BLOCK_TOKENS, own).committed_tokens == 5 * BLOCK_TOKENS
        stats = pools[0].stats()
        assert (harbors[0].stats().session_count, stats.sequence_count, stats.shared_block_count) == (count, count, 4)
        for harbor in harbors[1:]:
            harbor.close()
        held[0].release()
        stats = pools[0].stats()
        assert (harbors[0].stats().session_count, stats.sequence_count) == (1, 0)
        assert (stats.cached_block_count, stats.free_block_count) == (4 + count, count)
