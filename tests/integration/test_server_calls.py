"""The API as it comes over the socket: pools, sequences, batches, and refusals with their details."""

import concurrent.futures
import os
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2

from conftest import StartService
from kvharbor.v1 import cache_service_pb2 as cache
from kvharbor.v1 import errors_pb2, types_pb2
from kvharbor.v1 import pool_service_pb2 as pools
from raw_caller import BLOCK_BYTES, RawCaller, refused, small_layout, tokens
from service_process import ServiceProcess


@pytest.fixture
def caller(harbor: str) -> Iterator[RawCaller]:
    """A session with the shared service."""
    with RawCaller(harbor) as session:
        yield session


@pytest.fixture
def pool_id(caller: RawCaller, request: pytest.FixtureRequest) -> Iterator[str]:
    """A pool of 64 blocks that is dropped again."""
    opened = caller.open_pool(f"calls-{request.node.name[:48]}".replace("[", "-").replace("]", ""))
    yield opened
    caller.call(caller.pools.CloseSession, pools.CloseSessionRequest())


def allocate(caller: RawCaller, pool_id: str, token_ids: bytes, **fields: object) -> types_pb2.Sequence:
    """Allocates and returns the sequence."""
    request = cache.AllocateRequest(pool_id=pool_id, token_ids=token_ids, **fields)  # type: ignore[arg-type]
    response: cache.AllocateResponse = caller.call(caller.cache.Allocate, request)
    return response.sequence


def stats(caller: RawCaller, pool_id: str) -> cache.PoolStats:
    """Returns a pool's snapshot."""
    response: cache.StatsResponse = caller.call(caller.cache.Stats, cache.StatsRequest(pool_id=pool_id))
    return response.pools[0]


def test_the_service_tells_what_it_is_without_a_session(harbor: str) -> None:
    """GetServerInfo works for anybody who reaches the socket; pools need somebody who is known."""
    with RawCaller(harbor) as caller:
        info = caller.pools.GetServerInfo(pools.GetServerInfoRequest(), timeout=5)
        assert (list(info.api_versions), list(info.arena_kinds)) == (["v1"], ["host"])
        assert info.epoch == caller.welcome.epoch
        assert 0 <= info.memory_available_bytes <= info.memory_bytes == 64 * 2**20
        assert caller.cache.Stats(cache.StatsRequest(), timeout=5).session_count >= 1
        with refused() as found:
            caller.pools.ListPools(pools.ListPoolsRequest(), timeout=5)
        assert (found[0].code, found[0].reason) == (grpc.StatusCode.UNAUTHENTICATED, "SESSION_REQUIRED")
        with refused() as found:
            caller.pools.ListPools(pools.ListPoolsRequest(), metadata=(("kvharbor-session", "forged"),), timeout=5)
        assert (found[0].code, found[0].reason) == (grpc.StatusCode.UNAUTHENTICATED, "SESSION_UNKNOWN")


def test_every_reply_and_refusal_names_the_epoch(caller: RawCaller, pool_id: str) -> None:
    """The trailer of a call has it, so that a caller in any language notices another life of the service."""

    def named(call: Any) -> list[str]:
        return [value for name, value in call.trailing_metadata() if name == "kvharbor-epoch"]

    _, answered = caller.cache.Stats.with_call(cache.StatsRequest(pool_id=pool_id), metadata=caller.metadata)
    with pytest.raises(grpc.RpcError) as refusal:
        caller.call(caller.cache.Stats, cache.StatsRequest(pool_id=f"{pool_id}0"))
    watch = caller.cache.Watch(cache.WatchRequest(pool_id=f"{pool_id}0"), metadata=caller.metadata)
    assert named(answered) == named(refusal.value) == named(watch) == [caller.welcome.epoch]


def test_opening_twice_gives_the_same_pool(caller: RawCaller) -> None:
    """Another size or layout is refused, and every differing field named."""
    layout = small_layout()
    first = caller.open_pool("twice")
    assert caller.open_pool("twice") == first
    with refused() as found:
        caller.open_pool("twice", block_count=65)
    assert (found[0].reason, found[0].metadata["currentSizeBytes"]) == ("POOL_SIZE_MISMATCH", str(65 * BLOCK_BYTES))
    layout.model = "other"
    layout.planes[0].head_count, layout.planes[0].head_dim = 2, 8
    with refused() as found:
        caller.open_pool("twice", layout=layout)
    assert (found[0].code, found[0].reason) == (grpc.StatusCode.FAILED_PRECONDITION, "LAYOUT_MISMATCH")
    assert found[0].metadata == {
        "model": "other != m",
        "planes.k.head_count": "2 != 1",
        "planes.k.head_dim": "8 != 16",
    }


def test_concurrent_openings_of_a_name_make_one_pool(harbor: str) -> None:
    """Memory is booked once, whoever comes first."""
    callers = [RawCaller(harbor) for _ in range(4)]
    before = callers[0].pools.GetServerInfo(pools.GetServerInfoRequest()).memory_available_bytes
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        opened = list(threads.map(lambda caller: caller.open_pool("raced", block_count=8191), callers))
    after = callers[0].pools.GetServerInfo(pools.GetServerInfoRequest()).memory_available_bytes
    assert len(set(opened)) == 1
    assert before - after == 8192 * BLOCK_BYTES
    for caller in callers[1:]:
        caller.call(caller.pools.CloseSession, pools.CloseSessionRequest())
    dropped = callers[0].call(callers[0].pools.DropPool, pools.DropPoolRequest(pool_id=opened[0]))
    assert dropped == pools.DropPoolResponse(already_dropped=False)
    assert callers[0].pools.GetServerInfo(pools.GetServerInfoRequest()).memory_available_bytes == before
    for caller in callers:
        caller.close()


def test_a_pool_that_is_used_is_not_dropped(caller: RawCaller, harbor: str) -> None:
    """By another session, a sequence or a pin; each count is told. Dropping twice is nothing."""
    dropped = caller.open_pool("dropped")
    request = pools.DropPoolRequest(pool_id=dropped)
    with RawCaller(harbor) as other:
        other.open_pool("dropped")
        allocate(other, dropped, tokens(1))
        with refused() as found:
            caller.call(caller.pools.DropPool, request)
        assert (found[0].reason, found[0].metadata) == (
            "POOL_IN_USE",
            {"sessionCount": "1", "sequenceCount": "1", "pinCount": "0", "blockCount": "0"},
        )
        other.call(other.pools.CloseSession, pools.CloseSessionRequest())
    assert not caller.call(caller.pools.DropPool, request).already_dropped
    assert caller.call(caller.pools.DropPool, request).already_dropped
    with refused() as found:
        caller.call(caller.pools.DescribePool, pools.DescribePoolRequest(pool_id=dropped))
    assert (found[0].code, found[0].reason) == (grpc.StatusCode.NOT_FOUND, "POOL_NOT_FOUND")


def test_pools_are_listed_by_name_a_page_at_a_time(service: ServiceProcess) -> None:
    """Each exactly once; a token that is none of ours is refused."""
    with RawCaller(str(service.socket)) as caller:
        for name in ("c", "a", "b"):
            caller.open_pool(name, block_count=1)
        first = caller.call(caller.pools.ListPools, pools.ListPoolsRequest(page_size=2))
        assert [pool.name for pool in first.pools] == ["a", "b"]
        rest = caller.call(
            caller.pools.ListPools, pools.ListPoolsRequest(page_size=2, page_token=first.next_page_token)
        )
        assert ([pool.name for pool in rest.pools], rest.next_page_token) == (["c"], "")
        for wrong in (pools.ListPoolsRequest(page_token="%"), pools.ListPoolsRequest(page_size=-1)):
            with refused() as found:
                caller.call(caller.pools.ListPools, wrong)
            assert found[0].reason == "INVALID_FIELD"


def test_a_batch_fails_item_by_item(caller: RawCaller, pool_id: str) -> None:
    """Each item has its own status, with everything that the error of a whole call would have."""
    good = allocate(caller, pool_id, tokens(*range(20)))
    items = [
        cache.CommitItem(sequence_id=good.sequence_id, computed_tokens=20),
        cache.CommitItem(sequence_id=f"{good.sequence_id}9", computed_tokens=1),
        cache.CommitItem(sequence_id=good.sequence_id, computed_tokens=5),
        cache.CommitItem(sequence_id=good.sequence_id, computed_tokens=21),
        cache.CommitItem(sequence_id=good.sequence_id, computed_tokens=20, new_token_ids=b"abc"),
    ]
    results = caller.call(caller.cache.Commit, cache.CommitRequest(pool_id=pool_id, items=items)).results
    assert [result.status.reason for result in results] == [
        errors_pb2.ERROR_REASON_UNSPECIFIED,
        errors_pb2.ERROR_REASON_SEQUENCE_NOT_FOUND,
        errors_pb2.ERROR_REASON_COMMIT_BACKWARDS,
        errors_pb2.ERROR_REASON_CURSOR_OUT_OF_RANGE,
        errors_pb2.ERROR_REASON_INVALID_FIELD,
    ]
    assert results[0].committed_tokens == 16
    assert results[2].status.metadata == {
        "sequenceId": good.sequence_id,
        "computedTokens": "20",
        "requestedTokens": "5",
    }
    assert good.sequence_id in results[2].status.message


def test_a_refused_extend_tells_the_unchanged_room(caller: RawCaller, pool_id: str) -> None:
    """And the one beside it is extended."""
    sequence = allocate(caller, pool_id, tokens(1))
    items = [
        cache.ExtendItem(sequence_id=sequence.sequence_id, capacity_tokens=16 * 65),
        cache.ExtendItem(sequence_id=sequence.sequence_id, capacity_tokens=17),
    ]
    results = caller.call(caller.cache.Extend, cache.ExtendRequest(pool_id=pool_id, items=items)).results
    assert [(result.status.reason, result.capacity_tokens) for result in results] == [
        (errors_pb2.ERROR_REASON_REQUEST_TOO_LARGE, 16),
        (errors_pb2.ERROR_REASON_UNSPECIFIED, 32),
    ]
    assert len(results[1].added.block_ids) == 4


def test_a_full_pool_says_what_holds_it_and_when_to_come_again(caller: RawCaller, pool_id: str) -> None:
    """RESOURCE_EXHAUSTED with every number."""
    allocate(caller, pool_id, tokens(1), reserve_tokens=16 * 60)
    with refused() as found:
        allocate(caller, pool_id, tokens(2), reserve_tokens=16 * 5)
    assert (found[0].code, found[0].reason, found[0].domain) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "POOL_EXHAUSTED",
        "kvharbor",
    )
    assert found[0].metadata["neededBlockCount"] == "6"
    assert found[0].metadata["freeBlockCount"] == "3"
    with refused() as found:
        allocate(caller, pool_id, tokens(2), reserve_tokens=16 * 64)
    assert (found[0].code, found[0].reason) == (grpc.StatusCode.OUT_OF_RANGE, "REQUEST_TOO_LARGE")


def test_an_allocate_waits_for_room_without_holding_up_its_session(caller: RawCaller, pool_id: str) -> None:
    """The same session's Release, sent meanwhile, is what lets it through."""
    full = allocate(caller, pool_id, tokens(1), reserve_tokens=16 * 63)
    request = cache.AllocateRequest(pool_id=pool_id, token_ids=tokens(2), wait=duration_pb2.Duration(seconds=10))
    waiting = caller.cache.Allocate.future(request, metadata=caller.metadata, timeout=10)
    while not stats(caller, pool_id).waiting_count:
        pass
    release = cache.ReleaseRequest(pool_id=pool_id, items=[cache.ReleaseItem(sequence_id=full.sequence_id)])
    assert caller.call(caller.cache.Release, release).results[0].released_sequence_count == 1
    assert waiting.result(10).sequence.token_count == 1
    assert stats(caller, pool_id).waiting_count == 0


def test_a_caller_that_gives_up_leaves_nothing_behind(caller: RawCaller, pool_id: str) -> None:
    """Cancelled or out of time while it waits, an Allocate holds nothing and waits no more."""
    allocate(caller, pool_id, tokens(1), reserve_tokens=16 * 63)
    before = stats(caller, pool_id)
    request = cache.AllocateRequest(pool_id=pool_id, token_ids=tokens(2), wait=duration_pb2.Duration(seconds=60))
    waiting = caller.cache.Allocate.future(request, metadata=caller.metadata, timeout=10)
    while not stats(caller, pool_id).waiting_count:
        pass
    waiting.cancel()
    while stats(caller, pool_id).waiting_count:
        pass
    with refused() as found:
        caller.cache.Allocate(request, metadata=caller.metadata, timeout=0.05)
    assert found[0].code is grpc.StatusCode.DEADLINE_EXCEEDED
    while stats(caller, pool_id).waiting_count:
        pass
    request.wait.FromMilliseconds(10)
    with refused() as found:
        caller.call(caller.cache.Allocate, request)
    assert found[0].reason == "POOL_EXHAUSTED"
    after = stats(caller, pool_id)
    assert (after.sequence_count, after.free_block_count) == (before.sequence_count, before.free_block_count)


def test_releasing_again_is_no_error(caller: RawCaller, pool_id: str) -> None:
    """By handle, request_id or group; a handle that never was is one."""
    first = allocate(caller, pool_id, tokens(1), request_id="r", group="g")
    items = [
        cache.ReleaseItem(group="g"),
        cache.ReleaseItem(group="g"),
        cache.ReleaseItem(request_id="r"),
        cache.ReleaseItem(sequence_id=first.sequence_id),
        cache.ReleaseItem(sequence_id=f"{first.sequence_id}99"),
        cache.ReleaseItem(),
    ]
    results = caller.call(caller.cache.Release, cache.ReleaseRequest(pool_id=pool_id, items=items)).results
    assert [(result.already_released, result.released_sequence_count) for result in results[:4]] == [
        (False, 1),
        (True, 0),
        (True, 0),
        (True, 0),
    ]
    assert [result.status.code for result in results] == [
        0,
        0,
        0,
        0,
        grpc.StatusCode.NOT_FOUND.value[0],
        grpc.StatusCode.INVALID_ARGUMENT.value[0],
    ]


def test_a_request_id_takes_effect_once(caller: RawCaller, pool_id: str) -> None:
    """A duplicate gets the same sequence; with other arguments it is refused."""
    first = allocate(caller, pool_id, tokens(1, 2), request_id="r")
    assert allocate(caller, pool_id, tokens(1, 2), request_id="r") == first
    with refused() as found:
        allocate(caller, pool_id, tokens(1, 3), request_id="r")
    assert (found[0].code, found[0].reason) == (grpc.StatusCode.FAILED_PRECONDITION, "REQUEST_ID_REUSED")
    assert stats(caller, pool_id).sequence_count == 1


def test_children_get_copies_of_the_tail(caller: RawCaller, pool_id: str) -> None:
    """The bytes of the page are those of the source, in a block of each child's own."""
    response, (arena,) = caller.attach(pool_id)
    span = response.attached.pool.spans[0]
    source = allocate(caller, pool_id, tokens(*range(20)))
    blocks = [int.from_bytes(source.table.block_ids[i : i + 4], "little") for i in (0, 4)]
    os.pwrite(arena, b"\x07" * BLOCK_BYTES, span.offset_bytes + blocks[1] * span.block_stride_bytes)
    item = cache.CommitItem(sequence_id=source.sequence_id, computed_tokens=20)
    caller.call(caller.cache.Commit, cache.CommitRequest(pool_id=pool_id, items=[item]))
    request = cache.ForkRequest(pool_id=pool_id, sequence_id=source.sequence_id, child_count=2, request_id="f")
    children = caller.call(caller.cache.Fork, request).children
    tails = [int.from_bytes(child.table.block_ids[4:8], "little") for child in children]
    assert len({blocks[1], *tails}) == 3
    for tail in tails:
        page = os.pread(arena, BLOCK_BYTES, span.offset_bytes + tail * span.block_stride_bytes)
        assert page == b"\x07" * BLOCK_BYTES
    assert [child.request_id for child in children] == ["f/0", "f/1"]
    assert caller.call(caller.cache.Fork, request).children == children
    os.close(arena)


def test_a_hand_off_is_taken_once(caller: RawCaller, pool_id: str, harbor: str) -> None:
    """By another session of the tenant; its handle is another, and the old one has ended."""
    given = allocate(caller, pool_id, tokens(*range(20)))
    item = cache.CommitItem(sequence_id=given.sequence_id, computed_tokens=20)
    handoff = caller.call(caller.cache.Handoff, cache.HandoffRequest(pool_id=pool_id, commit=item))
    assert handoff.ttl.seconds == 30
    with RawCaller(harbor) as other:
        other.open_pool(stats(caller, pool_id).name)
        request = cache.AdoptRequest(pool_id=pool_id, handoff_token=handoff.handoff_token, group="g")
        taken = other.call(other.cache.Adopt, request).sequence
        assert (taken.table, taken.computed_tokens) == (given.table, 20)
        assert taken.sequence_id != given.sequence_id
        with refused() as found:
            other.call(other.cache.Adopt, request)
        assert (found[0].code, found[0].reason) == (grpc.StatusCode.NOT_FOUND, "HANDOFF_NOT_FOUND")
    with refused() as found:
        caller.call(caller.cache.Handoff, cache.HandoffRequest(pool_id=pool_id, commit=item))
    assert (found[0].reason, found[0].metadata) == ("SEQUENCE_NOT_FOUND", {"sequenceId": given.sequence_id})


def test_a_pin_keeps_and_ends(caller: RawCaller, pool_id: str) -> None:
    """Warm over budget is refused whole; an unknown pin is told."""
    held = allocate(caller, pool_id, tokens(*range(32)))
    item = cache.CommitItem(sequence_id=held.sequence_id, computed_tokens=32)
    caller.call(caller.cache.Commit, cache.CommitRequest(pool_id=pool_id, items=[item]))
    request = cache.WarmupRequest(pool_id=pool_id, token_ids=tokens(*range(48)), name="w")
    warmed = caller.call(caller.cache.Warmup, request)
    assert (warmed.pinned_tokens, warmed.missing_tokens, warmed.sequence.cached_tokens) == (32, 16, 32)
    assert not warmed.HasField("ttl")
    with refused() as found:
        caller.call(
            caller.cache.Warmup,
            cache.WarmupRequest(pool_id=pool_id, token_ids=tokens(*range(1000, 1320)), name="x"),
        )
    assert (found[0].code, found[0].reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "WARM_BUDGET_EXCEEDED")
    caller.call(caller.cache.Unwarm, cache.UnwarmRequest(pool_id=pool_id, name="w"))
    with refused() as found:
        caller.call(caller.cache.Unwarm, cache.UnwarmRequest(pool_id=pool_id, name="w"))
    assert (found[0].reason, found[0].metadata) == ("PIN_NOT_FOUND", {"name": "w"})


def test_an_administrator_evicts(caller: RawCaller, pool_id: str) -> None:
    """A block with what lies below it, or all that nobody holds."""
    held = allocate(caller, pool_id, tokens(*range(32)))
    item = cache.CommitItem(sequence_id=held.sequence_id, computed_tokens=32)
    caller.call(caller.cache.Commit, cache.CommitRequest(pool_id=pool_id, items=[item]))
    block = cache.EvictBlock(
        block_id=int.from_bytes(held.table.block_ids[:4], "little"),
        generation=int.from_bytes(held.table.generations[:8], "little"),
    )
    with refused() as found:
        caller.call(caller.cache.Evict, cache.EvictRequest(pool_id=pool_id, block=block))
    assert (found[0].reason, found[0].metadata["heldBlockCount"]) == ("BLOCK_HELD", "2")
    release = cache.ReleaseRequest(pool_id=pool_id, items=[cache.ReleaseItem(sequence_id=held.sequence_id)])
    caller.call(caller.cache.Release, release)
    evicted = caller.call(caller.cache.Evict, cache.EvictRequest(pool_id=pool_id, block=block))
    assert evicted.evicted_block_count == 2
    assert (
        caller.call(caller.cache.Evict, cache.EvictRequest(pool_id=pool_id, all_unheld=True)).evicted_block_count == 0
    )
    with refused() as found:
        caller.call(caller.cache.Evict, cache.EvictRequest(pool_id=pool_id, all_unheld=False))
    assert found[0].reason == "INVALID_FIELD"


def test_a_session_closed_twice_is_closed(harbor: str) -> None:
    """Its sequences are released, its token is nobody's, and the side socket ends."""
    with RawCaller(harbor) as caller:
        pool_id = caller.open_pool("closing")
        allocate(caller, pool_id, tokens(1))
        assert caller.call(caller.pools.CloseSession, pools.CloseSessionRequest()).released_sequence_count == 1
        assert caller.call(caller.pools.CloseSession, pools.CloseSessionRequest()).released_sequence_count == 0
        assert caller.side.recv(1) == b""
        with refused() as found:
            allocate(caller, pool_id, tokens(1))
        assert found[0].reason == "SESSION_UNKNOWN"


def test_a_prompt_of_a_million_tokens_fits(start_fresh: StartService) -> None:
    """Message limits are those of the service's promise: 2^20 tokens."""
    service = start_fresh(memory="128MiB")
    with RawCaller(str(service.socket)) as caller:
        pool_id = caller.open_pool("large", block_count=2**16)
        sequence = allocate(caller, pool_id, bytes(4 * 2**20))
        assert (sequence.token_count, len(sequence.table.block_ids)) == (2**20, 4 * 2**16)
        item = cache.CommitItem(sequence_id=sequence.sequence_id, computed_tokens=2**20)
        committed = caller.call(caller.cache.Commit, cache.CommitRequest(pool_id=pool_id, items=[item]))
        assert committed.results[0].committed_tokens == 2**20
