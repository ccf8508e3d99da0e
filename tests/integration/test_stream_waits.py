"""Waiting for room on a stream: in line with everybody, cancelled, given up, and never in the way of other requests."""

from google.protobuf import duration_pb2

from integration.stream_pools import BLOCK_COUNT, Parties, Party
from integration.stream_pools import parties as parties
from kvharbor.v1 import blocks_pb2, errors_pb2
from kvharbor.v1 import cache_service_pb2 as cache
from raw_caller import tokens
from raw_stream import RawStream, block_tokens, chain, committing, count, first, last, leasing, releasing
from waiting import until

LONG = duration_pb2.Duration(seconds=20)
SHORT = duration_pb2.Duration(nanos=50_000_000)
EXHAUSTED = errors_pb2.ERROR_REASON_POOL_EXHAUSTED


def waiting_count(party: Party) -> int:
    """Requests of the pool that wait."""
    return int(party.caller.stats(party.pool_id).waiting_count)


def test_a_lease_waits_until_somebody_gives_back(parties: Parties) -> None:
    """Its answer comes at once, its grant later, and what is behind it is served meanwhile."""
    one, other = parties.join(), parties.join()
    room = one.stream.lease(one.pool_id, BLOCK_COUNT).leased
    number = other.stream.send(lease=leasing(other.pool_id, 4, wait=LONG))
    answer = other.stream.answer(number)
    assert (answer.waiting, count(answer.leased)) == (True, 0)
    assert other.stream.acquire(other.pool_id, chain(1))[0].status.code == 0
    assert waiting_count(one) == 1
    one.stream.ask(release_blocks=releasing(one.pool_id, first(room, 3)))
    assert waiting_count(one) == 1
    one.stream.ask(release_blocks=releasing(one.pool_id, last(room, 1)))
    granted = other.stream.granted(number)
    assert (granted.result.status.code, count(granted.result.leased), granted.chain_index) == (0, 4, 0)
    assert waiting_count(one) == 0


def test_the_first_chain_that_does_not_fit_waits_and_those_behind_are_not_tried(parties: Parties) -> None:
    """Not even one that would fit: they are admitted in order."""
    one, other = parties.join(), parties.join()
    one.stream.lease(one.pool_id, 8)
    asked = [chain(1, table_block_count=4), chain(2, table_block_count=6), chain(3, table_block_count=1)]
    request = blocks_pb2.AcquireRequest(pool_id=other.pool_id, chains=asked, wait=LONG)
    number = other.stream.send(acquire=request)
    results = other.stream.answer(number).results
    assert [result.status.reason for result in results] == [0, EXHAUSTED, EXHAUSTED]
    assert [result.waiting for result in results] == [False, True, False]
    assert [count(result.leased) for result in results] == [4, 0, 0]
    other.stream.ask(release_blocks=releasing(other.pool_id, results[0].leased))
    granted = other.stream.granted(number)
    assert (granted.chain_index, count(granted.result.leased)) == (1, 6)


def test_a_chain_that_never_fits_is_told_so_and_is_in_nobodys_way(parties: Parties) -> None:
    """REQUEST_TOO_LARGE, whatever waits; the next chain is tried."""
    (one,) = (parties.join(),)
    asked = [chain(1, table_block_count=BLOCK_COUNT + 1), chain(2, table_block_count=1)]
    results = one.stream.acquire(one.pool_id, *asked, wait=LONG)
    assert results[0].status.reason == errors_pb2.ERROR_REASON_REQUEST_TOO_LARGE
    assert (results[0].waiting, count(results[1].leased)) == (False, 1)


def test_a_wait_ends_with_its_time(parties: Parties) -> None:
    """With the refusal; nothing is held for it."""
    one, other = parties.join(), parties.join()
    one.stream.lease(one.pool_id, BLOCK_COUNT)
    number = other.stream.send(lease=leasing(other.pool_id, 1, wait=SHORT))
    assert other.stream.answer(number).waiting
    granted = other.stream.granted(number)
    assert granted.result.status.reason == EXHAUSTED
    assert waiting_count(one) == 0


def test_a_wait_can_be_cancelled(parties: Parties) -> None:
    """Nothing is granted after that; what does not wait cannot be cancelled."""
    one, other = parties.join(), parties.join()
    room = one.stream.lease(one.pool_id, BLOCK_COUNT).leased
    number = other.stream.send(lease=leasing(other.pool_id, 1, wait=LONG))
    cancel = blocks_pb2.CancelWaitRequest(request_number=number)
    assert other.stream.ask(cancel_wait=cancel).cancelled
    assert not other.stream.ask(cancel_wait=cancel).cancelled
    one.stream.ask(release_blocks=releasing(one.pool_id, room))
    assert count(other.stream.lease(other.pool_id, 1).leased) == 1
    assert not [response for response in other.stream.unread if response.WhichOneof("result") == "granted"]


def test_a_cancelled_allocate_has_its_response_first(parties: Parties) -> None:
    """It is refused as at the end of its time; then comes the answer to who has cancelled it."""
    one, other = parties.join(), parties.join()
    one.stream.lease(one.pool_id, BLOCK_COUNT)
    asked = cache.AllocateRequest(pool_id=other.pool_id, token_ids=block_tokens(1, 2), wait=LONG, request_id="r")
    number = other.stream.send(allocate=asked)
    cancel = other.stream.send(cancel_wait=blocks_pb2.CancelWaitRequest(request_number=number))
    refused, answer = other.stream.next(), other.stream.next()
    assert (refused.number, refused.refusal.reason) == (number, EXHAUSTED)
    assert (answer.number, answer.cancel_wait.cancelled) == (cancel, True)


def test_an_allocate_that_waits_is_answered_later(parties: Parties) -> None:
    """The requests behind it are not: one of them is what it waits for."""
    one = parties.join()
    room = one.stream.lease(one.pool_id, BLOCK_COUNT).leased
    asked = cache.AllocateRequest(pool_id=one.pool_id, token_ids=block_tokens(1, 2), wait=LONG)
    allocate = one.stream.send(allocate=asked)
    release = one.stream.send(release_blocks=releasing(one.pool_id, room))
    assert [one.stream.next().number, one.stream.next().number] == [release, allocate]


def test_an_allocate_waits_for_what_another_computes(parties: Parties) -> None:
    """Without a place in the line for room; a cancel has it compute by itself."""
    one, other = parties.join(), parties.join()
    writer = one.caller.allocate(one.pool_id, *range(48))
    asked = cache.AllocateRequest(pool_id=other.pool_id, token_ids=tokens(*range(48)), pending_wait=LONG)
    number = other.stream.send(allocate=asked)
    until(lambda: one.caller.stats(one.pool_id).pending_waiting_count)
    assert other.stream.acquire(other.pool_id, chain(9))[0].status.code == 0
    one.caller.commit(one.pool_id, writer.sequence_id, 48)
    assert other.stream.answer(number).sequence.cached_tokens == 32
    one.caller.allocate(one.pool_id, *range(100, 148))
    asked = cache.AllocateRequest(pool_id=other.pool_id, token_ids=tokens(*range(100, 148)), pending_wait=LONG)
    number = other.stream.send(allocate=asked)
    until(lambda: one.caller.stats(one.pool_id).pending_waiting_count)
    assert not other.stream.ask(cancel_wait=blocks_pb2.CancelWaitRequest(request_number=number)).cancelled
    assert other.stream.answer(number).sequence.cached_tokens == 0


def test_what_waits_ends_with_its_stream(parties: Parties) -> None:
    """The room that comes is the next one's, and nothing stays held that nobody was told of."""
    one, other = parties.join(), parties.join()
    room = one.stream.lease(one.pool_id, BLOCK_COUNT).leased
    other.stream.send(lease=leasing(other.pool_id, 2, wait=LONG))
    other.stream.send(allocate=cache.AllocateRequest(pool_id=other.pool_id, token_ids=block_tokens(1), wait=LONG))
    until(lambda: waiting_count(one), lambda waiting: waiting == 2)
    with RawStream(other.caller):
        until(lambda: waiting_count(one), lambda waiting: waiting == 0)
    one.stream.ask(release_blocks=releasing(one.pool_id, room))
    until(lambda: one.caller.stats(one.pool_id).free_block_count, lambda free: free == BLOCK_COUNT)


def test_growth_goes_before_who_waits(parties: Parties) -> None:
    """And takes no more than it needs then; it does not wait itself."""
    one, other = parties.join(), parties.join()
    room = one.stream.lease(one.pool_id, BLOCK_COUNT).leased
    number = other.stream.send(lease=leasing(other.pool_id, 8, wait=LONG))
    other.stream.answer(number)
    refused = one.stream.lease(one.pool_id, 1, growth=True, wait=LONG)
    assert refused.reason == EXHAUSTED
    one.stream.ask(release_blocks=releasing(one.pool_id, first(room, 4)))
    grown = one.stream.lease(one.pool_id, 1, 4, growth=True)
    assert count(grown.leased) == 1
    one.stream.ask(release_blocks=releasing(one.pool_id, last(room, 5)))
    assert count(other.stream.granted(number).result.leased) == 8


def test_what_was_committed_meanwhile_is_found(parties: Parties) -> None:
    """A request that has waited matches anew: it leases less then."""
    one, other = parties.join(), parties.join()
    (room,) = one.stream.acquire(one.pool_id, chain(1, 2, 3, table_block_count=BLOCK_COUNT))
    asked = chain(1, 2, 3, table_block_count=4)
    number = other.stream.send(acquire=blocks_pb2.AcquireRequest(pool_id=other.pool_id, chains=[asked], wait=LONG))
    assert other.stream.answer(number).results[0].waiting
    one.stream.ask(commit_blocks=committing(one.pool_id, first(room.leased, 3), 1, 2, 3))
    one.stream.ask(release_blocks=releasing(one.pool_id, last(room.leased, 4)))
    granted = other.stream.granted(number).result
    assert (count(granted.held), count(granted.leased)) == (3, 1)


def test_nobody_gets_more_than_he_needs_while_others_wait(parties: Parties) -> None:
    """Who wants more as well gets it when he is alone, waiting or not."""
    one, other, third = parties.join(), parties.join(), parties.join()
    room = one.stream.lease(one.pool_id, BLOCK_COUNT).leased
    waiting = other.stream.send(lease=leasing(other.pool_id, 2, 10, wait=LONG))
    assert other.stream.answer(waiting).waiting
    behind = third.stream.send(lease=leasing(third.pool_id, 1, 10, wait=LONG))
    assert third.stream.answer(behind).waiting
    one.stream.ask(release_blocks=releasing(one.pool_id, room))
    assert count(other.stream.granted(waiting).result.leased) == 2
    assert count(third.stream.granted(behind).result.leased) == 10
