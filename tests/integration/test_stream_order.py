"""A session's stream: requests take effect in the order in which they were sent, and each has one response [S33]."""

from collections.abc import Iterator

import pytest

from kvharbor.v1 import blocks_pb2, errors_pb2, pool_service_pb2, types_pb2
from kvharbor.v1 import cache_service_pb2 as cache
from kvharbor.v1 import stream_service_pb2 as pb
from raw_caller import RawCaller, Refused, tokens
from raw_stream import RawStream, chain, committing, count, first, leasing, releasing

SHARED = "stream-order"


@pytest.fixture
def stream(caller: RawCaller) -> Iterator[RawStream]:
    """Its stream."""
    with RawStream(caller) as opened:
        yield opened


@pytest.fixture
def pool_id(harbor: str, caller: RawCaller) -> Iterator[str]:
    """A pool of 64 blocks, which nobody else uses. Whatever the session has there ends with it."""
    made = caller.open_pool(SHARED)
    yield made
    caller.close()
    with RawCaller(harbor) as last:
        last.call(last.pools.DropPool, pool_service_pb2.DropPoolRequest(pool_id=made))


def test_a_commit_has_taken_effect_before_the_next_acquire(stream: RawStream, pool_id: str) -> None:
    """Neither is awaited. A hundred times, as an order that is only likely would break now and then."""
    for number in range(100):
        (room,) = stream.acquire(pool_id, chain(number, table_block_count=1))
        assert count(room.leased) == 1
        commit = stream.send(commit_blocks=committing(pool_id, room.leased, number))
        found = stream.send(acquire=blocks_pb2.AcquireRequest(pool_id=pool_id, chains=[chain(number)]))
        release = stream.send(release_blocks=releasing(pool_id, room.leased))
        assert stream.answer(commit).results[0].status.code == 0
        assert stream.answer(found).results[0].held == room.leased
        assert stream.answer(release).released_block_count == 1


def test_every_request_has_one_response_in_order(stream: RawStream, pool_id: str) -> None:
    """Refused ones too, of every kind."""
    sent = [
        stream.send(acquire=blocks_pb2.AcquireRequest(pool_id=pool_id, chains=[chain(7, table_block_count=2)])),
        stream.send(lease=leasing("nonsense", 1)),
        stream.send(),
        stream.send(allocate=cache.AllocateRequest(pool_id=pool_id, token_ids=tokens(*range(20)), request_id="r")),
        stream.send(extend=cache.ExtendRequest(pool_id=pool_id)),
        stream.send(commit=cache.CommitRequest(pool_id=pool_id)),
        stream.send(fork=cache.ForkRequest(pool_id=pool_id, sequence_id="nobody's", child_count=1)),
        stream.send(handoff=cache.HandoffRequest(pool_id=pool_id)),
        stream.send(adopt=cache.AdoptRequest(pool_id=pool_id, handoff_token="t")),
        stream.send(release=cache.ReleaseRequest(pool_id=pool_id, items=[cache.ReleaseItem(request_id="r")])),
        stream.send(release_blocks=blocks_pb2.ReleaseBlocksRequest(pool_id=pool_id)),
        stream.send(commit_blocks=blocks_pb2.CommitBlocksRequest(pool_id=pool_id)),
        stream.send(invalidate_blocks=blocks_pb2.InvalidateBlocksRequest(pool_id=pool_id)),
        stream.send(bump_namespace=blocks_pb2.BumpNamespaceRequest(pool_id=pool_id)),
        stream.send(cancel_wait=blocks_pb2.CancelWaitRequest(request_number=3)),
        stream.send(computing=blocks_pb2.ComputingRequest(pool_id=pool_id)),
        stream.send(abandon=blocks_pb2.AbandonRequest(pool_id=pool_id)),
        stream.send(lease=leasing(pool_id, 1)),
    ]
    came = [stream.next() for _ in sent]
    assert [response.number for response in came] == sent
    kinds = [
        "acquire",
        "refusal",
        "refusal",
        "allocate",
        "extend",
        "commit",
        "refusal",
        "refusal",
        "refusal",
        "release",
    ]
    kinds += ["release_blocks", "commit_blocks", "invalidate_blocks", "bump_namespace", "cancel_wait"]
    kinds += ["computing", "abandon", "lease"]
    assert [response.WhichOneof("result") for response in came] == kinds
    assert came[1].refusal.reason == errors_pb2.ERROR_REASON_POOL_NOT_FOUND
    assert came[9].release.results[0].released_sequence_count == 1


def test_numbers_have_to_rise(caller: RawCaller) -> None:
    """What came before is answered; the stream ends."""
    with RawStream(caller) as stream:
        stream.send()
        stream.send_raw(pb.ConverseRequest(number=1))
        assert stream.next().number == 1
        failure = stream.ended()
    assert failure is not None
    refused = Refused(failure)
    assert (refused.reason, refused.metadata["field"]) == ("INVALID_FIELD", "number")


def test_unary_calls_and_the_stream_see_each_other(caller: RawCaller, stream: RawStream, pool_id: str) -> None:
    """They work on the same sequences, by the same handles."""
    sequence = caller.allocate(pool_id, *range(40))
    item = cache.CommitItem(sequence_id=sequence.sequence_id, computed_tokens=32)
    committed = stream.ask(commit=cache.CommitRequest(pool_id=pool_id, items=[item]))
    assert committed.results[0].committed_tokens == 32
    again = stream.ask(allocate=cache.AllocateRequest(pool_id=pool_id, token_ids=tokens(*range(40))))
    assert again.sequence.cached_tokens == 32
    lookup = cache.LookupRequest(pool_id=pool_id, token_ids=tokens(*range(40)))
    assert caller.call(caller.cache.Lookup, lookup).present_tokens == 32
    release = cache.ReleaseRequest(
        pool_id=pool_id, items=[cache.ReleaseItem(sequence_id=one.sequence_id) for one in (sequence, again.sequence)]
    )
    assert [result.released_sequence_count for result in stream.ask(release=release).results] == [1, 1]


def test_a_second_stream_takes_the_place_of_the_first(caller: RawCaller, stream: RawStream, pool_id: str) -> None:
    """What the session holds stays; the first ends with CANCELLED."""
    room = stream.lease(pool_id, 3).leased
    with RawStream(caller) as second:
        failure = stream.ended()
        assert failure is not None
        assert failure.code().name == "CANCELLED"
        assert second.ask(release_blocks=releasing(pool_id, room)).released_block_count == 3


def test_who_has_said_all_gets_all(caller: RawCaller, pool_id: str) -> None:
    """Half a close: what was asked is answered, and the stream ends without an error."""
    with RawStream(caller) as stream:
        sent = [stream.send(lease=leasing(pool_id, 1)) for _ in range(10)]
        stream.half_close()
        rooms = [stream.answer(number).leased for number in sent]
        assert stream.ended() is None
        assert caller.stats(pool_id).reserved_block_count == 10
    with RawStream(caller) as stream:
        assert stream.ask(release_blocks=releasing(pool_id, *rooms)).released_block_count == 10


def test_the_end_of_its_session_ends_a_stream(harbor: str) -> None:
    """With the cause, as it does every call of it."""
    with RawCaller(harbor) as caller, RawStream(caller) as stream:
        caller.side.close()
        failure = stream.ended()
        assert failure is not None
        assert Refused(failure).reason == "SESSION_UNKNOWN"


def test_a_stream_needs_a_session(harbor: str) -> None:
    """As every call that takes blocks."""
    with RawCaller(harbor) as caller:
        caller.metadata = (("kvharbor-other", "nothing"),)
        with RawStream(caller) as stream:
            failure = stream.ended()
            assert failure is not None
            assert Refused(failure).reason == "SESSION_REQUIRED"


def test_a_bump_is_meant_by_every_request_behind_it(caller: RawCaller, stream: RawStream, pool_id: str) -> None:
    """What was there is not found any more, and freed as nobody else is at that version."""
    (room,) = stream.acquire(pool_id, chain(1, 2, table_block_count=2))
    stream.ask(commit_blocks=committing(pool_id, room.leased, 1, 2))
    (found,) = stream.acquire(pool_id, chain(1, 2))
    assert count(found.held) == 2
    version = stream.ask(bump_namespace=blocks_pb2.BumpNamespaceRequest(pool_id=pool_id)).version
    assert version
    (lost,) = stream.acquire(pool_id, chain(1, 2))
    assert count(lost.held) == 0
    lookup = cache.LookupRequest(pool_id=pool_id, token_ids=chain(1, 2).token_ids)
    assert caller.call(caller.cache.Lookup, lookup).present_tokens == 0
    stream.ask(release_blocks=releasing(pool_id, room.leased))
    assert caller.stats(pool_id).free_block_count == 64
    named = stream.ask(bump_namespace=blocks_pb2.BumpNamespaceRequest(pool_id=pool_id, version="v2")).version
    assert named == "v2"


def test_what_is_invalidated_is_leased_again(stream: RawStream, pool_id: str) -> None:
    """In a new generation, and is nobody's hit; what is not held is told so."""
    (room,) = stream.acquire(pool_id, chain(1, 2, table_block_count=2))
    stream.ask(commit_blocks=committing(pool_id, room.leased, 1, 2))
    answer = stream.ask(
        invalidate_blocks=blocks_pb2.InvalidateBlocksRequest(pool_id=pool_id, blocks=first(room.leased))
    )
    assert [status.code for status in answer.statuses] == [0]
    assert (answer.invalidated.block_ids, count(answer.leased)) == (room.leased.block_ids, 2)
    again = stream.ask(invalidate_blocks=blocks_pb2.InvalidateBlocksRequest(pool_id=pool_id, blocks=first(room.leased)))
    assert again.statuses[0].reason == errors_pb2.ERROR_REASON_BLOCK_NOT_HELD
    assert stream.ask(release_blocks=releasing(pool_id, answer.leased)).released_block_count == 2


def test_a_token_of_nobody_opens_no_stream(harbor: str) -> None:
    """As that of an earlier epoch: nothing that is still under way then takes effect in the new one."""
    with RawCaller(harbor) as caller:
        pool_id = caller.open_pool(SHARED)
        own, caller.metadata = caller.metadata, (("kvharbor-session", "of an earlier epoch"),)
        with RawStream(caller) as stream:
            stream.send(lease=leasing(pool_id, 1))
            failure = stream.ended()
        caller.metadata = own
        assert failure is not None
        assert Refused(failure).reason == "SESSION_UNKNOWN"
        assert caller.stats(pool_id).reserved_block_count == 0


def test_what_an_acquire_could_hold_is_bounded_without_a_lease_too(stream: RawStream, pool_id: str) -> None:
    """Its reply has to fit in a message: contents count where no table is asked for."""
    opaque = types_pb2.NamespaceKey(scheme="test")
    known = blocks_pb2.BlockChain(namespace=opaque, keys=bytes(32) * 2**18)
    acquire = blocks_pb2.AcquireRequest(pool_id=pool_id, chains=[known, chain(1, table_block_count=2**18 + 1)])
    refused = stream.ask(acquire=acquire)
    assert refused.reason == errors_pb2.ERROR_REASON_INVALID_FIELD
    assert refused.metadata["field"] == "chains"
