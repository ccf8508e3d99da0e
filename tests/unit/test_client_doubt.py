"""What leaves a commit or a hand-off in doubt, what takes the doubt away, and what is told of it meanwhile [C5]."""

import threading

import numpy as np
import pytest

from client_states import CALLS, fail, state
from fake_service import DEADLINE_S, FakeService
from integration.client_kinds import Connect
from integration.client_worker import LAYOUT
from kvharbor.client import (
    Commit,
    DeadlineExceeded,
    Draining,
    ExtraKey,
    HarborError,
    InvalidField,
    MessageTooLarge,
    ResumeRequired,
    SequenceBusy,
    SequenceInDoubt,
    ServiceAway,
    Starting,
    connect,
    extra_keys,
)
from kvharbor.client.batches import CommitBatch, Repeats
from kvharbor.client.channel import MAX_MESSAGE_BYTES
from kvharbor.client.tokens import TOKEN_BYTES
from kvharbor.pool import validate
from kvharbor.v1 import cache_service_pb2 as cache
from kvharbor.v1 import types_pb2
from moments import halt, hurried, once, wait_for


@pytest.mark.parametrize("failure", [ResumeRequired("r"), ServiceAway("a"), Starting("s"), Draining("d")])
def test_what_is_refused_for_now_may_have_been_sent_before(failure: HarborError) -> None:
    """The process that took it in may have ended, and its answer with it: the error says so."""
    sequence = state()
    failure.outcome_unknown = True
    batch = CommitBatch.of(CALLS, [Commit(sequence, 40, [5, 6])])
    with pytest.raises(type(failure)):
        fail(batch, failure)
    assert sequence.unanswered is not None


def test_a_refusal_brings_back_the_doubt_of_before() -> None:
    """That of a hand-off says nothing of a commit before it."""
    sequence = state()
    first = CommitBatch.of(CALLS, [Commit(sequence, 40, [5, 6])])
    first.sending()
    with pytest.raises(SequenceBusy):
        fail(CommitBatch(CALLS, [(sequence, sequence.commit_item(42, [5, 6], leaving=True))]), SequenceBusy("busy"))
    assert sequence.unanswered == first.call.request.items[0]  # type: ignore[attr-defined]


def test_a_hand_off_is_repeated_as_a_whole() -> None:
    """No commit of a part of it goes before, as that would be one of a sequence that is given away."""
    sequence = state()
    sequence.unanswered = sequence.commit_item(42, [5, 6], leaving=True)
    sequence.leave()
    assert Repeats(CALLS, [Commit(sequence, 42, [5, 6])]).batch is None
    assert Repeats(CALLS, [Commit(sequence, 43, [5, 6, 7])]).batch is None


def test_a_hand_off_that_was_never_sent_has_not_been_one() -> None:
    """The blocks are still this process's."""
    sequence = state()
    batch = CommitBatch(CALLS, [(sequence, sequence.commit_item(40, (), leaving=True))])
    with pytest.raises(ServiceAway), batch.answered(leaving=True):
        raise ServiceAway("away")
    sequence.require_usable()


def test_a_hand_off_under_way_is_told_as_taken(open_harbor: Connect, service: FakeService) -> None:
    """C11: its commit may have taken effect, and it is sent again."""
    held = open_harbor(service.target).open_pool("p", LAYOUT).allocate(range(20))

    def end_and_come_back() -> None:
        service.blink()
        (told,) = service.wait_until_resumed().sequences
        assert told.sequence.computed_tokens == 16

    once(service.after, "Handoff", end_and_come_back)
    assert held.handoff(16) == f"token of {held.id}"
    assert len(service.calls["Handoff"]) == 2


def test_a_hand_off_that_is_refused_leaves_no_doubt(open_harbor: Connect, service: FakeService) -> None:
    """Nothing of it was done, so that it may be another one the next time."""
    token_count = MAX_MESSAGE_BYTES // TOKEN_BYTES
    held = open_harbor(service.target).open_pool("p", LAYOUT).allocate(range(20), reserve_tokens=token_count)
    with pytest.raises(MessageTooLarge):
        held.handoff(16, np.zeros(token_count, np.uint32))
    held.require_usable()
    assert held.handoff(20, [7])


def test_a_hand_off_that_was_sent_may_have_been_one(service: FakeService) -> None:
    """In a process that is gone: its blocks may be anybody's before the next one says so."""
    telling, given_up = threading.Event(), threading.Event()

    def die() -> None:
        once(service.before, "Resume", halt(telling, given_up))
        service.blink()
        assert telling.wait(DEADLINE_S)

    with connect(service.target, away_wait_s=0.1) as harbor:
        held = harbor.open_pool("p", LAYOUT).allocate(range(20))
        once(service.after, "Handoff", die)
        with pytest.raises(ServiceAway):
            held.handoff(16)
        with pytest.raises(SequenceInDoubt):
            held.slots(16, 20)
        given_up.set()
        service.wait_until_resumed()
        held.release()


def test_a_repetition_that_is_out_of_time_does_not_end_what_it_repeats(
    open_harbor: Connect, service: FakeService
) -> None:
    """C4: the first one's object still stands for the sequence, and its owner writes to the blocks."""
    answered = threading.Event()
    pool = open_harbor(service.target).open_pool("p", LAYOUT)
    held = pool.allocate(range(20), request_id="r")
    once(service.after, "Allocate", wait_for(answered))
    with hurried(pool), pytest.raises(DeadlineExceeded):
        pool.allocate(range(20), request_id="r")
    answered.set()
    assert held.commit(20).committed_tokens == 16
    assert "Release" not in service.calls
    held.release()


def test_a_repeated_commit_does_not_bring_back_what_was_switched() -> None:
    """The service answers a repetition with all shadows that it knows of, reported or not."""
    sequence = state()
    shadow = cache.Shadow(position=1, block_id=11, generation=9)
    batch = CommitBatch.of(CALLS, [Commit(sequence, 41, [5])])
    batch.sending()
    sequence.held()
    sequence.resumed(cache.ResumeResult(committed_tokens=32, shadows=[shadow]))
    assert sequence.switch_shadows() == (1,)
    batch.outcomes(cache.CommitResponse(results=[cache.CommitResult(committed_tokens=32, shadows=[shadow])]))
    assert sequence.shadows == ()
    assert list(sequence.commit_item(41, ()).switched_positions) == [1]


@pytest.mark.parametrize(
    "keys",
    [
        [ExtraKey(39, b"of a token before")],
        [ExtraKey(42, b"behind the tokens")],
        [ExtraKey(41, b"not"), ExtraKey(40, b"in order")],
        [ExtraKey(40, b"")],
        [ExtraKey(40, b"x" * 257)],
        [ExtraKey(40, b"x" * 200)] * 8,
    ],
)
def test_extra_keys_that_would_be_refused_are_not_told(keys: list[ExtraKey]) -> None:
    """C11: the next process would refuse the sequence for them, or take in what is another block's key."""
    sequence = state()
    sequence.tail.extra_keys = [types_pb2.ExtraKey(token_offset=39, value=b"y" * 256)] * 10
    before = sequence.held()
    batch = CommitBatch.of(CALLS, [Commit(sequence, 42, [5, 6], keys)])
    batch.sending()
    assert sequence.held() == before
    (refusal,) = batch.here()
    assert type(refusal) is InvalidField
    (done,) = CommitBatch.of(CALLS, [Commit(sequence, 42, [5, 6], [ExtraKey(40, b"x" * 256)])]).here()
    assert not isinstance(done, HarborError)


def test_the_bounds_of_extra_keys_are_the_services() -> None:
    """What is not told is what would be refused."""
    assert (extra_keys.MAX_KEYS, extra_keys.MAX_VALUE_BYTES) == (validate.MAX_EXTRA_KEYS, validate.MAX_KEY_BYTES)
    assert (extra_keys.BYTES_A_TOKEN, extra_keys.LEAST_BYTES) == (
        validate.EXTRA_BYTES_A_TOKEN,
        validate.LEAST_EXTRA_BYTES,
    )
