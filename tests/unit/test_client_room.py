"""Commits beyond the table that is known here, as it is after an extend without an answer [C5]."""

import threading
from typing import Any

import pytest

from client_states import CALLS, state
from decoding_here import prefilled
from fake_service import FakeService
from fake_stream import blocks_of
from integration.client_kinds import Connect
from integration.client_worker import LAYOUT
from kvharbor.client import (
    Commit,
    CommitBackwards,
    CommitResult,
    Credits,
    CursorOutOfRange,
    DeadlineExceeded,
    DecodeBatch,
    HarborError,
    PoolExhausted,
    SequenceInDoubt,
    ServiceAway,
    StaleEpoch,
    connect,
)
from kvharbor.client.batches import CommitBatch, ExtendBatch
from kvharbor.client.tokens import token_bytes
from kvharbor.pool import Commit as PoolCommit
from kvharbor.pool import Pool, PoolConfig, Prompt
from kvharbor.pool.errors import PoolError
from kvharbor.pool.steps import finish
from kvharbor.v1 import cache_service_pb2 as cache
from kvharbor.v1 import errors_pb2, types_pb2
from moments import answered, hurried, once, wait_for
from waiting import until


def outgrow(service: FakeService, pool: Any, sequence: Any) -> None:
    """Has an extend take effect that is given up before it is answered."""
    given_up = threading.Event()
    once(service.after, "Extend", wait_for(given_up))
    with hurried(pool), pytest.raises(DeadlineExceeded):
        sequence.extend(16)
    given_up.set()


@pytest.mark.parametrize(
    ("computed_tokens", "new_count", "kind"),
    [(40, 9, CursorOutOfRange), (41, 0, CursorOutOfRange), (-1, 0, CursorOutOfRange), (15, 0, CommitBackwards)],
)
def test_what_is_refused_here_is_refused_in_the_service_s_words(
    computed_tokens: int, new_count: int, kind: type[HarborError]
) -> None:
    """Value, limit and remedy."""
    there = Pool(PoolConfig(block_count=3, block_tokens=16))
    there.open_session(1, "t")
    sequence = finish(there.allocate(1, Prompt(token_bytes(range(40), "prompt")))).number
    finish(there.commit(1, sequence, PoolCommit(16)))
    with pytest.raises(PoolError) as told:
        finish(there.commit(1, sequence, PoolCommit(computed_tokens, token_bytes(range(new_count), "new_tokens"))))
    (refusal,) = CommitBatch.of(CALLS, [Commit(state(), computed_tokens, range(new_count))]).here()
    assert type(refusal) is kind
    assert refusal.reason == told.value.reason
    assert str(refusal) == str(told.value).replace(f"sequence 1.{sequence}", "sequence e.1.2.3")
    assert refusal.metadata["sequenceId"] == "e.1.2.3"
    assert all(value in str(refusal) for value in refusal.metadata.values())


def test_a_commit_that_there_is_no_room_for_is_refused_alone() -> None:
    """The others are sent, and each outcome stands in its place."""
    first, beyond, last = state(), state(), state()
    batch = CommitBatch.of(CALLS, [Commit(first, 40), Commit(beyond, 40, range(9)), Commit(last, 32)])
    batch.sending()
    sent = batch.call.request.items  # type: ignore[attr-defined]
    assert [item.computed_tokens for item in sent] == [40, 32]
    assert (beyond.unanswered, batch.is_empty) == (None, False)
    results = [cache.CommitResult(committed_tokens=tokens) for tokens in (32, 16)]
    outcomes = batch.outcomes(cache.CommitResponse(results=results))
    assert [outcomes[0], outcomes[2]] == [CommitResult(32), CommitResult(16)]
    assert type(outcomes[1]) is CursorOutOfRange
    assert (beyond.computed_tokens, beyond.token_count) == (16, 40)


def test_room_that_only_the_service_knows_of_is_not_used(open_harbor: Connect, service: FakeService) -> None:
    """L12: its next process is told of the table that is known here; an extend of any length brings that up to date."""
    pool = open_harbor(service.target).open_pool("p", LAYOUT)
    held = pool.allocate(range(16))
    outgrow(service, pool, held)
    assert (held.capacity_tokens, service.sequences[held.id].capacity_tokens) == (16, 32)
    for use in (held.commit, held.handoff):
        with pytest.raises(CursorOutOfRange, match="extend the sequence first"):
            use(16, [5])
    assert {"Commit", "Handoff"} & {*service.calls} == set()
    held.require_usable()
    held.extend(0)
    assert held.capacity_tokens == 32
    assert held.commit(16, [5]) == CommitResult(16)
    held.release()


def test_room_that_only_the_service_knows_of_ends_with_its_process(open_harbor: Connect, service: FakeService) -> None:
    """C11: away or back, a commit beyond what is known here is refused, and the sequence stays whole."""
    pool = open_harbor(service.target).open_pool("p", LAYOUT)
    held = pool.allocate(range(16))
    outgrow(service, pool, held)
    service.kill()
    until(lambda: held.commit(16).pending)
    with pytest.raises(CursorOutOfRange):
        held.commit(16, [5])
    service.begin()
    until(lambda: answered(pool))
    (told,) = service.wait_until_resumed().sequences
    assert (told.sequence.token_count, len(told.sequence.table.block_ids) // 4) == (16, 1)
    with pytest.raises(CursorOutOfRange):
        held.commit(16, [5])
    held.extend(1)
    assert held.commit(16, [5]).committed_tokens == 16
    held.release()


def test_a_commit_without_an_answer_is_repeated_before_one_that_there_is_no_room_for(
    open_harbor: Connect, service: FakeService
) -> None:
    """It has its one effect, and the doubt ends."""
    pool = open_harbor(service.target).open_pool("p", LAYOUT)
    held = pool.allocate(range(12))
    given_up = threading.Event()
    once(service.before, "Commit", wait_for(given_up))
    with hurried(pool), pytest.raises(DeadlineExceeded):
        held.commit(12, [1, 2])
    given_up.set()
    with pytest.raises(CursorOutOfRange):
        held.commit(12, range(1, 10))
    assert held.token_count == service.sequences[held.id].token_count == 14
    held.require_usable()
    held.release()


@pytest.mark.parametrize("by", ["extend", "restart"])
def test_an_extend_in_doubt_keeps_a_sequence_out_of_a_batch(service: FakeService, by: str) -> None:
    """What is appended there has its place behind blocks that are not known here."""
    with connect(service.target) as harbor:
        pool = harbor.open_pool("p", LAYOUT)
        batch = DecodeBatch(pool, Credits(pool, 4))
        held = prefilled(pool, 16)
        outgrow(service, pool, held)
        with pytest.raises(SequenceInDoubt, match="extend it again, by 0"):
            batch.join(held)
        if by == "extend":
            held.extend(0)
        else:
            service.restart()
            until(lambda: answered(pool) and not held.outgrown)
        batch.join(held)
        for _ in range(20):
            until(lambda: not batch.step([5]).refused)
        batch.leave(held)
        assert held.table.tolist() == [block for block, _ in blocks_of(service.sequences[held.id].table)]
        held.release()


@pytest.mark.parametrize("failure", [ServiceAway("nothing was sent"), StaleEpoch("refused")])
def test_an_extend_without_effect_leaves_no_doubt(failure: HarborError) -> None:
    """Nor does one that is answered; one that is refused says nothing of an earlier one."""
    sequence = state()
    with pytest.raises(type(failure)), ExtendBatch(CALLS, [(sequence, 1)]).answered():
        raise failure
    assert not sequence.outgrown
    failure.outcome_unknown = True
    with pytest.raises(type(failure)), ExtendBatch(CALLS, [(sequence, 1)]).answered():
        raise failure
    full = types_pb2.ItemStatus(code=8, reason=errors_pb2.ERROR_REASON_POOL_EXHAUSTED, message="full")
    (refused,) = ExtendBatch(CALLS, [(sequence, 9)]).outcomes(
        cache.ExtendResponse(results=[cache.ExtendResult(status=full, capacity_tokens=64)])
    )
    assert (type(refused), sequence.outgrown) == (PoolExhausted, True)
