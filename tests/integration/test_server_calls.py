"""Sequences as they are called for over the socket: batches, waits, and refusals with their details."""

import os

import grpc
from google.protobuf import duration_pb2

from conftest import StartService
from kvharbor.v1 import cache_service_pb2 as cache
from kvharbor.v1 import errors_pb2
from raw_caller import BLOCK_BYTES, RawCaller, refused, tokens
from waiting import until


def test_a_batch_fails_item_by_item(caller: RawCaller, pool_id: str) -> None:
    """Each item has its own status, with everything that the error of a whole call would have."""
    good = caller.allocate(pool_id, *range(20))
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
    sequence = caller.allocate(pool_id, 1)
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
    caller.allocate(pool_id, 1, reserve_tokens=16 * 60)
    with refused() as found:
        caller.allocate(pool_id, 2, reserve_tokens=16 * 5)
    assert (found[0].code, found[0].reason, found[0].domain) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "POOL_EXHAUSTED",
        "kvharbor",
    )
    assert found[0].metadata["neededBlockCount"] == "6"
    assert found[0].metadata["freeBlockCount"] == "3"
    with refused() as found:
        caller.allocate(pool_id, 2, reserve_tokens=16 * 64)
    assert (found[0].code, found[0].reason) == (grpc.StatusCode.OUT_OF_RANGE, "REQUEST_TOO_LARGE")


def test_an_allocate_waits_for_room_without_holding_up_its_session(caller: RawCaller, pool_id: str) -> None:
    """The same session's Release, sent meanwhile, is what lets it through."""
    full = caller.allocate(pool_id, 1, reserve_tokens=16 * 63)
    request = cache.AllocateRequest(pool_id=pool_id, token_ids=tokens(2), wait=duration_pb2.Duration(seconds=10))
    waiting = caller.cache.Allocate.future(request, metadata=caller.metadata, timeout=10)
    until(lambda: caller.stats(pool_id).waiting_count)
    release = cache.ReleaseRequest(pool_id=pool_id, items=[cache.ReleaseItem(sequence_id=full.sequence_id)])
    assert caller.call(caller.cache.Release, release).results[0].released_sequence_count == 1
    assert waiting.result(10).sequence.token_count == 1
    assert caller.stats(pool_id).waiting_count == 0


def test_a_caller_that_gives_up_leaves_nothing_behind(caller: RawCaller, pool_id: str) -> None:
    """Cancelled or out of time while it waits, an Allocate holds nothing and waits no more."""
    caller.allocate(pool_id, 1, reserve_tokens=16 * 63)
    before = caller.stats(pool_id)
    request = cache.AllocateRequest(pool_id=pool_id, token_ids=tokens(2), wait=duration_pb2.Duration(seconds=60))
    waiting = caller.cache.Allocate.future(request, metadata=caller.metadata, timeout=10)
    until(lambda: caller.stats(pool_id).waiting_count)
    waiting.cancel()
    until(lambda: not caller.stats(pool_id).waiting_count)
    with refused() as found:
        caller.cache.Allocate(request, metadata=caller.metadata, timeout=0.05)
    assert found[0].code is grpc.StatusCode.DEADLINE_EXCEEDED
    until(lambda: not caller.stats(pool_id).waiting_count)
    request.wait.FromMilliseconds(10)
    with refused() as found:
        caller.call(caller.cache.Allocate, request)
    assert found[0].reason == "POOL_EXHAUSTED"
    after = caller.stats(pool_id)
    assert (after.sequence_count, after.free_block_count) == (before.sequence_count, before.free_block_count)


def test_releasing_again_is_no_error(caller: RawCaller, pool_id: str) -> None:
    """By handle, request_id or group; a handle that never was is one."""
    first = caller.allocate(pool_id, 1, request_id="r", group="g")
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
    first = caller.allocate(pool_id, 1, 2, request_id="r")
    assert caller.allocate(pool_id, 1, 2, request_id="r") == first
    with refused() as found:
        caller.allocate(pool_id, 1, 3, request_id="r")
    assert (found[0].code, found[0].reason) == (grpc.StatusCode.FAILED_PRECONDITION, "REQUEST_ID_REUSED")
    assert caller.stats(pool_id).sequence_count == 1


def test_children_get_copies_of_the_tail(caller: RawCaller, pool_id: str) -> None:
    """The bytes of the page are those of the source, in a block of each child's own."""
    response, (arena,) = caller.attach(pool_id)
    span = response.attached.pool.spans[0]
    source = caller.allocate(pool_id, *range(20))
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
    given = caller.allocate(pool_id, *range(20))
    item = cache.CommitItem(sequence_id=given.sequence_id, computed_tokens=20)
    handoff = caller.call(caller.cache.Handoff, cache.HandoffRequest(pool_id=pool_id, commit=item))
    assert handoff.ttl.seconds == 30
    with RawCaller(harbor) as other:
        other.open_pool(caller.stats(pool_id).name)
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
    held = caller.allocate(pool_id, *range(32))
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
    held = caller.allocate(pool_id, *range(32))
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


def test_a_prompt_of_a_million_tokens_fits(start_fresh: StartService) -> None:
    """Message limits are those of the service's promise: 2^20 tokens."""
    service = start_fresh(memory="128MiB")
    with RawCaller(str(service.socket)) as caller:
        pool_id = caller.open_pool("large", block_count=2**16)
        sequence = caller.allocate(pool_id, *[0] * 2**20)
        assert (sequence.token_count, len(sequence.table.block_ids)) == (2**20, 4 * 2**16)
        item = cache.CommitItem(sequence_id=sequence.sequence_id, computed_tokens=2**20)
        committed = caller.call(caller.cache.Commit, cache.CommitRequest(pool_id=pool_id, items=[item]))
        assert committed.results[0].committed_tokens == 2**20
