"""H5: numbers and names from the wire are input, and change nothing when they are wrong."""

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2

from kvharbor.v1 import cache_service_pb2 as cache
from kvharbor.v1 import pool_service_pb2 as pools
from kvharbor.v1 import types_pb2
from raw_caller import RawCaller, refused, tokens
from waiting import quickest, seconds

pytestmark = pytest.mark.alone

MOST_ANSWER_S = 0.1
LARGEST = 2**63 - 1
NOT_FOUND = grpc.StatusCode.NOT_FOUND.value[0]
BAD_NUMBER = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE}
BAD_NUMBER_CODES = {code.value[0] for code in BAD_NUMBER}


class Pool:
    """A pool of 32 blocks with one sequence of 20 tokens, 16 of them committed."""

    def __init__(self, caller: RawCaller, name: str) -> None:
        self.caller = caller
        self.pool_id = caller.open_pool(name, block_count=32)
        self.sequence = self.allocate(token_ids=tokens(*range(20))).sequence
        self.commit(computed_tokens=16)

    def allocate(self, **fields: Any) -> cache.AllocateResponse:
        """Allocates."""
        request = cache.AllocateRequest(pool_id=self.pool_id, **fields)
        response: cache.AllocateResponse = self.caller.call(self.caller.cache.Allocate, request)
        return response

    def commit(self, sequence_id: str | None = None, **fields: Any) -> int:
        """Commits one item; returns its status code."""
        named = self.sequence.sequence_id if sequence_id is None else sequence_id
        item = cache.CommitItem(sequence_id=named, **fields)
        request = cache.CommitRequest(pool_id=self.pool_id, items=[item])
        return int(self.caller.call(self.caller.cache.Commit, request).results[0].status.code)

    def extend(self, capacity_tokens: int) -> int:
        """Extends one item; returns its status code."""
        item = cache.ExtendItem(sequence_id=self.sequence.sequence_id, capacity_tokens=capacity_tokens)
        request = cache.ExtendRequest(pool_id=self.pool_id, items=[item])
        return int(self.caller.call(self.caller.cache.Extend, request).results[0].status.code)

    def release(self, sequence_id: str) -> int:
        """Releases one item; returns its status code."""
        item = cache.ReleaseItem(sequence_id=sequence_id)
        request = cache.ReleaseRequest(pool_id=self.pool_id, items=[item])
        return int(self.caller.call(self.caller.cache.Release, request).results[0].status.code)

    def fork(self, sequence_id: str | None = None, **fields: Any) -> cache.ForkResponse:
        """Forks."""
        named = self.sequence.sequence_id if sequence_id is None else sequence_id
        request = cache.ForkRequest(pool_id=self.pool_id, sequence_id=named, **fields)
        response: cache.ForkResponse = self.caller.call(self.caller.cache.Fork, request)
        return response

    def warm(self, ttl: duration_pb2.Duration) -> cache.WarmupResponse:
        """Pins the committed block."""
        request = cache.WarmupRequest(pool_id=self.pool_id, token_ids=tokens(*range(16)), name="w", ttl=ttl)
        response: cache.WarmupResponse = self.caller.call(self.caller.cache.Warmup, request)
        return response

    def classes(self) -> dict[str, int]:
        """Returns the blocks of each class, after checking that they sum to the total."""
        request = cache.StatsRequest(pool_id=self.pool_id)
        answers: list[cache.PoolStats] = []

        def ask() -> None:
            answers.append(self.caller.call(self.caller.cache.Stats, request).pools[0])

        assert quickest(lambda: seconds(ask), MOST_ANSWER_S) < MOST_ANSWER_S
        stats = answers[0]
        names = ("free", "reserved", "active", "cached", "warm", "quarantined")
        counts = {name: getattr(stats, f"{name}_block_count") for name in names}
        assert sum(counts.values()) == stats.total_block_count == 32
        return {**counts, "sequences": stats.sequence_count, "pins": stats.pin_count}


@pytest.fixture
def pool(harbor: str, request: pytest.FixtureRequest) -> Iterator[Pool]:
    """A pool whose blocks are in the same classes after the test as before it."""
    with RawCaller(harbor) as caller:
        made = Pool(caller, f"h5-{abs(hash(request.node.nodeid))}")
        before = made.classes()
        yield made
        assert made.classes() == before
        assert made.commit(computed_tokens=16) == 0


@pytest.mark.parametrize("computed_tokens", [21, -1, 2**31, LARGEST, -LARGEST - 1])
def test_a_commit_beyond_the_end_or_below_zero_is_refused(pool: Pool, computed_tokens: int) -> None:
    """H5: length + 1, -1, 2^31, 2^63 - 1."""
    assert pool.commit(computed_tokens=computed_tokens) in BAD_NUMBER_CODES


def test_an_extend_to_nothing_is_nothing_and_beyond_the_pool_is_refused(pool: Pool) -> None:
    """H5: 0, and 2^20 tokens more than the pool has."""
    assert pool.extend(0) == 0
    assert {pool.extend(count) for count in (32 * 16 + 2**20, LARGEST, -1)} <= BAD_NUMBER_CODES


@pytest.mark.parametrize("reserve_tokens", [2**62, LARGEST, -1, -LARGEST - 1])
def test_a_reserve_that_would_overflow_is_refused(pool: Pool, reserve_tokens: int) -> None:
    """H5: rounding 2^62 tokens up to blocks must not wrap around."""
    with refused() as found:
        pool.allocate(token_ids=tokens(1), reserve_tokens=reserve_tokens)
    assert found[0].code in BAD_NUMBER
    with refused() as found:
        pool.fork(child_count=1, reserve_tokens=reserve_tokens)
    assert found[0].code in BAD_NUMBER


@pytest.mark.parametrize(
    "fields",
    [
        {"token_ids": b""},
        {"token_ids": b"abc"},
        {"token_ids": tokens(1, 2), "max_cached_tokens": 3},
        {"token_ids": tokens(1, 2), "max_cached_tokens": -1},
        {"token_ids": tokens(1), "request_id": "r" * 129},
        {"token_ids": tokens(1), "group": "g" * (1 << 20)},
        {"token_ids": tokens(1), "namespace": types_pb2.NamespaceKey(salt=bytes(257))},
        {"token_ids": tokens(1), "namespace": types_pb2.NamespaceKey(version="v" * 1000)},
        {"token_ids": tokens(1), "extra_keys": [types_pb2.ExtraKey(token_offset=1, value=b"x")]},
        {"token_ids": tokens(1), "extra_keys": [types_pb2.ExtraKey(token_offset=-1, value=b"x")]},
        {"token_ids": tokens(1), "extra_keys": [types_pb2.ExtraKey(token_offset=LARGEST, value=b"x")]},
        {"token_ids": tokens(1), "extra_keys": [types_pb2.ExtraKey(value=b"")]},
        {"token_ids": tokens(1), "extra_keys": [types_pb2.ExtraKey(value=bytes(257))]},
        {"token_ids": tokens(1), "wait": duration_pb2.Duration(seconds=-1)},
        {"token_ids": tokens(1), "wait": duration_pb2.Duration(seconds=LARGEST)},
    ],
)
def test_a_prompt_that_is_none_is_refused(pool: Pool, fields: dict[str, Any]) -> None:
    """H5: empty, of odd length, with names too long, with offsets outside it, with times out of the world."""
    with refused() as found:
        pool.allocate(**fields)
    assert (found[0].code, found[0].reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert {"field", "value", "limit", "remedy"} <= set(found[0].metadata)


@pytest.mark.parametrize("child_count", [0, -1, 1025, 2**31 - 1])
def test_a_fork_into_none_or_too_many_is_refused(pool: Pool, child_count: int) -> None:
    """H5: 1 to 1,024."""
    with refused() as found:
        pool.fork(child_count=child_count)
    assert found[0].code in BAD_NUMBER


@pytest.mark.parametrize(
    "fields",
    [
        {"written": types_pb2.BlockTable(block_ids=b"abc")},
        {"written": types_pb2.BlockTable(block_ids=bytes(4), generations=bytes(7))},
        {"written": types_pb2.BlockTable(block_ids=bytes(400), generations=bytes(8))},
        {"written": types_pb2.BlockTable(block_ids=b"\xff" * 4, generations=b"\xff" * 8)},
        {"switched_positions": [-1]},
        {"switched_positions": [2**31 - 1]},
        {"new_token_ids": b"abc"},
    ],
)
def test_a_commit_of_blocks_that_are_none_is_refused(pool: Pool, fields: dict[str, Any]) -> None:
    """H5: arrays that do not fit each other, blocks outside the pool, positions outside the table."""
    assert pool.commit(computed_tokens=20, **fields) != 0


def of_another_session(pool: Pool) -> str:
    return pool.sequence.sequence_id.replace(f".{pool.caller.welcome.session_id}.", ".999999.")


HANDLES: dict[str, Callable[[Pool], str]] = {
    "unknown": lambda pool: f"{pool.sequence.sequence_id}7",
    "of another session": of_another_session,
    "empty": lambda _: "",
    "of a mebibyte": lambda _: "9" * (1 << 20),
    "respelt": lambda pool: pool.sequence.sequence_id.replace(".1", ".01"),
    "signed": lambda pool: f"{pool.sequence.sequence_id.rpartition('.')[0]}.-1",
    "in other digits": lambda pool: f"{pool.sequence.sequence_id.rpartition('.')[0]}.\u0661",
    "too large": lambda pool: f"{pool.sequence.sequence_id.rpartition('.')[0]}.{2**64}",
}


@pytest.mark.parametrize("kind", HANDLES)
def test_a_handle_that_is_not_the_callers_is_not_found(pool: Pool, kind: str) -> None:
    """H5: whether it exists elsewhere does not show, and no long one comes back in full."""
    handle = HANDLES[kind](pool)
    assert pool.commit(handle, computed_tokens=16) == NOT_FOUND
    assert pool.release(handle) == NOT_FOUND
    with refused() as found:
        pool.fork(handle, child_count=1)
    assert (found[0].code, found[0].reason) == (grpc.StatusCode.NOT_FOUND, "SEQUENCE_NOT_FOUND")
    assert len(found[0].metadata["sequenceId"]) <= 80


def test_a_handle_of_another_life_is_told_apart(pool: Pool) -> None:
    """H5: the epoch it names is not the present one."""
    with refused() as found:
        pool.fork("000000000000.1.1.1", child_count=1)
    assert (found[0].code, found[0].reason) == (grpc.StatusCode.FAILED_PRECONDITION, "STALE_EPOCH")
    assert found[0].metadata == {
        "epoch": "000000000000",
        "currentEpoch": pool.caller.welcome.epoch,
        "remedy": "open the pool again",
    }


@pytest.mark.parametrize(
    "ttl",
    [
        duration_pb2.Duration(),
        duration_pb2.Duration(seconds=-1),
        duration_pb2.Duration(nanos=999_999),
        duration_pb2.Duration(seconds=LARGEST),
        duration_pb2.Duration(seconds=2**62, nanos=-1),
    ],
)
def test_a_time_to_live_that_is_none_is_refused(pool: Pool, ttl: duration_pb2.Duration) -> None:
    """H5: 0, -1, 2^63; set, it is at least a millisecond."""
    with refused() as found:
        pool.warm(ttl)
    assert (found[0].code, found[0].metadata["field"]) == (grpc.StatusCode.INVALID_ARGUMENT, "ttl")


@pytest.mark.parametrize("pool_id", ["", "x", "0.0", "9" * (1 << 20), "\u0661.1", "../1"])
def test_a_pool_that_is_none_is_not_found(pool: Pool, pool_id: str) -> None:
    """H5: in every call that names one."""
    calls = [
        (pool.caller.cache.Allocate, cache.AllocateRequest(pool_id=pool_id, token_ids=tokens(1))),
        (pool.caller.cache.Lookup, cache.LookupRequest(pool_id=pool_id, token_ids=tokens(1))),
        (pool.caller.pools.DescribePool, pools.DescribePoolRequest(pool_id=pool_id)),
    ]
    for method, request in calls:
        with refused() as found:
            pool.caller.call(method, request)
        assert (found[0].code, found[0].reason) == (grpc.StatusCode.NOT_FOUND, "POOL_NOT_FOUND")


def test_evicting_a_block_that_is_none_is_not_found(pool: Pool) -> None:
    """H5: outside the pool, a scratch block, of another generation."""
    for block_id, generation in ((2**32 - 1, 2**64 - 1), (0, 0), (1, 2**63)):
        block = cache.EvictBlock(block_id=block_id, generation=generation)
        with refused() as found:
            pool.caller.call(pool.caller.cache.Evict, cache.EvictRequest(pool_id=pool.pool_id, block=block))
        assert (found[0].code, found[0].reason) == (grpc.StatusCode.NOT_FOUND, "BLOCK_NOT_FOUND")


def test_a_pool_in_use_is_not_removed(pool: Pool) -> None:
    """H5: FAILED_PRECONDITION with the counts."""
    with refused() as found:
        pool.caller.call(pool.caller.pools.DropPool, pools.DropPoolRequest(pool_id=pool.pool_id))
    assert (found[0].code, found[0].reason) == (grpc.StatusCode.FAILED_PRECONDITION, "POOL_IN_USE")
    assert found[0].metadata == {"sessionCount": "0", "sequenceCount": "1", "pinCount": "0", "blockCount": "0"}
