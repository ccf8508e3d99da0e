"""Chains of a stream that are given nothing while another session computes what comes next [W8]."""

from google.protobuf import duration_pb2

from integration.stream_pools import BLOCK_COUNT, Parties, Party
from integration.stream_pools import parties as parties
from kvharbor.v1 import blocks_pb2, cache_service_pb2, errors_pb2
from raw_stream import RawStream, block_tokens, chain, committing, count, first, releasing
from waiting import until

LONG = duration_pb2.Duration(seconds=20)


def computing(*blocks: int, more: int = 0) -> blocks_pb2.BlockChain:
    """A chain of an engine that computes what nobody else does, with room for its blocks and so many more."""
    return chain(*blocks, table_block_count=len(blocks) + more, computes=True, unless_pending=True)


def figures(party: Party) -> tuple[int, int, int, int]:
    """Requests, prompt tokens, and blocks that are reserved and held."""
    stats = party.caller.stats(party.pool_id)
    counters = stats.counters
    return (
        counters.allocate_count,
        counters.prompt_token_count,
        stats.reserved_block_count,
        stats.active_block_count,
    )


def test_pending_alone_is_told_and_those_behind_it_are_served(parties: Parties) -> None:
    """It is no refusal, and no request."""
    one, other = parties.join(), parties.join()
    (given,) = one.stream.acquire(one.pool_id, computing(1, 2))
    requests, prompt_tokens, reserved, _ = figures(one)
    stands_back, served = other.stream.acquire(other.pool_id, computing(1, 2, 3), computing(4, 5), wait=LONG)
    assert stands_back.status.code == 0
    assert (count(stands_back.held), count(stands_back.leased), stands_back.waiting) == (0, 0, False)
    assert stands_back.pending.token_count == 2 * 16
    assert (count(served.leased), served.HasField("pending")) == (2, False)
    assert figures(one) == (requests + 1, prompt_tokens + 2 * 16, reserved + 2, 0)
    one.stream.ask(commit_blocks=committing(one.pool_id, given.leased, 1, 2))
    (found,) = other.stream.acquire(other.pool_id, computing(1, 2, 3))
    assert (count(found.held), count(found.leased), found.HasField("pending")) == (2, 1, False)


def test_a_full_pool_does_not_keep_it_from_being_told(parties: Parties) -> None:
    """It takes no room, so nobody is behind one that lacks some."""
    one, other = parties.join(), parties.join()
    one.stream.acquire(one.pool_id, computing(1))
    one.stream.lease(one.pool_id, BLOCK_COUNT - 2)
    results = other.stream.acquire(other.pool_id, computing(1, more=3), computing(2), computing(3), wait=LONG)
    assert [result.HasField("pending") for result in results] == [True, False, False]
    assert [(count(result.leased), result.waiting) for result in results] == [(0, False), (1, False), (0, True)]


def test_who_has_waited_for_room_leaves_when_another_computes_it_by_then(parties: Parties) -> None:
    """The room is for the next in line."""
    one, other, third = parties.join(), parties.join(), parties.join()
    writer = one.caller.allocate(one.pool_id, 1, reserve_tokens=31)
    room = one.stream.lease(one.pool_id, BLOCK_COUNT - 3).leased
    acquire = blocks_pb2.AcquireRequest(pool_id=other.pool_id, chains=[computing(1, 2)], wait=LONG)
    number = other.stream.send(acquire=acquire)
    assert other.stream.answer(number).results[0].waiting
    behind = third.stream.send(
        acquire=blocks_pb2.AcquireRequest(pool_id=third.pool_id, chains=[computing(3, 4)], wait=LONG)
    )
    assert third.stream.answer(behind).results[0].waiting
    # By a call that needs no room, what it waits with becomes what another computes.
    one.caller.commit(one.pool_id, writer.sequence_id, 0, new_token_ids=block_tokens(1, 2)[4:])
    before = figures(one)[:2]
    one.stream.ask(release_blocks=releasing(one.pool_id, first(room, 1)))
    granted = other.stream.granted(number).result
    assert (granted.status.code, count(granted.held), count(granted.leased)) == (0, 0, 0)
    assert granted.pending.token_count == 2 * 16
    assert count(third.stream.granted(behind).result.leased) == 2
    assert figures(one)[:2] == (before[0] + 1, before[1] + 2 * 16)
    assert not one.caller.stats(one.pool_id).waiting_count


def test_who_stands_back_takes_over_when_the_other_ends(parties: Parties) -> None:
    """At once; the next one stands back for that one."""
    one, other, third = parties.join(), parties.join(), parties.join()
    one.stream.acquire(one.pool_id, computing(1, 2))
    for party in (other, third):
        (result,) = party.stream.acquire(party.pool_id, computing(1, 2))
        assert result.pending.token_count == 2 * 16
    one.stream.close()
    one.caller.close()
    taken_over = until(lambda: _leased(other.stream, other.pool_id))
    assert taken_over == 2
    (result,) = third.stream.acquire(third.pool_id, computing(1, 2))
    assert (count(result.leased), result.pending.token_count) == (0, 2 * 16)


def test_who_stands_back_takes_over_what_the_other_gives_up(parties: Parties) -> None:
    """[B8] At once, though the other is at work on something else; what was leased for it stays."""
    one, other = parties.join(), parties.join()
    (given, _) = one.stream.acquire(one.pool_id, computing(1, 2), computing(5))
    one.stream.ask(computing=blocks_pb2.ComputingRequest(pool_id=one.pool_id))
    (result,) = other.stream.acquire(other.pool_id, computing(1, 2))
    assert result.pending.token_count == 2 * 16
    told = one.stream.ask(
        abandon=blocks_pb2.AbandonRequest(pool_id=one.pool_id, chains=[chain(1, 2), chain(1, 2, 3), chain(9)])
    )
    assert [status.code for status in told.statuses] == [0, 0, 0]
    assert _leased(other.stream, other.pool_id) == 2
    (left,) = other.stream.acquire(other.pool_id, computing(5))
    assert left.pending.token_count == 16
    assert one.stream.ask(release_blocks=releasing(one.pool_id, given.leased)).released_block_count == 2


def test_an_allocate_that_waits_is_answered_when_that_is_given_up(parties: Parties) -> None:
    """[W3]"""
    one, other = parties.join(), parties.join()
    one.stream.acquire(one.pool_id, computing(1, 2))
    number = other.stream.send(
        allocate=cache_service_pb2.AllocateRequest(
            pool_id=other.pool_id, token_ids=block_tokens(1, 2, 3), pending_wait=LONG
        )
    )
    until(lambda: other.caller.stats(other.pool_id).pending_waiting_count)
    one.stream.ask(abandon=blocks_pb2.AbandonRequest(pool_id=one.pool_id, chains=[chain(1, 2)]))
    answer = other.stream.answer(number)
    assert answer.sequence.cached_tokens == 0


def test_what_is_no_chain_is_refused_alone(parties: Parties) -> None:
    one = parties.join()
    half = blocks_pb2.BlockChain(token_ids=block_tokens(1)[:4])
    told = one.stream.ask(abandon=blocks_pb2.AbandonRequest(pool_id=one.pool_id, chains=[half, chain(1)]))
    assert [status.reason for status in told.statuses] == [errors_pb2.ERROR_REASON_INVALID_FIELD, 0]


def _leased(stream: RawStream, pool_id: str) -> int:
    (result,) = stream.acquire(pool_id, computing(1, 2))
    return count(result.leased)
