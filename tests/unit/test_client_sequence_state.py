"""What a client keeps of a sequence between calls."""

import asyncio
from array import array
from typing import Any

import numpy as np
import pytest

from client_states import CALLS, block_table, fail, state
from kvharbor.client import (
    Commit,
    CommitResult,
    DeadlineExceeded,
    ExtraKey,
    InvalidField,
    PoolExhausted,
    SequenceEnded,
    SequenceInDoubt,
    ServiceBug,
    Shadow,
    StaleGeneration,
    sequence_state,
)
from kvharbor.client.batches import CommitBatch, ExtendBatch, Repeats
from kvharbor.client.sequence_state import SequenceState
from kvharbor.v1 import cache_service_pb2 as cache
from kvharbor.v1 import errors_pb2, types_pb2


def commit(sequence: SequenceState, result: cache.CommitResult, *fields: Any) -> Any:
    batch = CommitBatch.of(CALLS, [Commit(sequence, *fields)])
    return batch.outcomes(cache.CommitResponse(results=[result]))[0]


def test_tables_are_the_arrays_that_kernels_take() -> None:
    """int32 ids and uint64 generations, the largest generation included."""
    sequence = state()
    assert (str(sequence.table.dtype), str(sequence.generations.dtype)) == ("int32", "uint64")
    assert (sequence.table.tolist(), sequence.generations.tolist()) == ([7, 8, 3], [70, 80, 2**63])


def test_slots_find_every_token_of_a_range() -> None:
    """As an index they read and write [block, token] of a view, across blocks that do not touch."""
    sequence = state()
    view = np.zeros((10, 16, 1, 1))
    view[sequence.slots(14, 34)] = np.arange(14, 34)[:, None, None]
    assert view[7, 14:, 0, 0].tolist() == [14, 15]
    assert view[8, :, 0, 0].tolist() == list(range(16, 32))
    assert view[3, :2, 0, 0].tolist() == [32, 33]
    assert np.count_nonzero(view) == 20


@pytest.mark.parametrize(("first", "end"), [(-1, 3), (5, 4), (0, 49)])
def test_slots_outside_the_capacity_are_refused(first: int, end: int) -> None:
    """No index may reach another sequence's block."""
    with pytest.raises(InvalidField, match="extend the sequence first"):
        state().slots(first, end)


@pytest.mark.parametrize(
    ("computed_before", "computed_after", "expected"),
    [(16, 40, [8, 3]), (20, 32, [8]), (0, 1, [7]), (31, 33, [8, 3]), (16, 16, [])],
)
def test_a_commit_names_the_blocks_that_it_wrote(
    computed_before: int, computed_after: int, expected: list[int]
) -> None:
    """Those with tokens from the previous computed_tokens to the new one, partial ones included."""
    item = state(computed_before).commit_item(computed_after, ())
    assert np.frombuffer(item.written.block_ids, "<u4").tolist() == expected
    assert len(item.written.generations) == 2 * len(item.written.block_ids)


def test_a_commit_moves_the_cursors_by_what_was_sent() -> None:
    """computed_tokens is set, token_count grows by the new tokens."""
    sequence = state()
    result = commit(sequence, cache.CommitResult(committed_tokens=32), 42, [5, 6])
    assert CommitResult(32) == result
    assert (sequence.computed_tokens, sequence.token_count) == (42, 42)


def test_a_refused_item_changes_nothing_and_comes_back_as_its_error() -> None:
    """Batches return refusals, so that the other items keep their results."""
    sequence = state()
    status = types_pb2.ItemStatus(code=9, reason=errors_pb2.ERROR_REASON_STALE_GENERATION, message="stale")
    outcome = commit(sequence, cache.CommitResult(status=status), 42, [5, 6])
    assert StaleGeneration is type(outcome)
    assert (sequence.computed_tokens, sequence.token_count) == (16, 40)


def test_an_extend_appends_what_was_added() -> None:
    """Arrays that were handed out before stay as they were [C9]."""
    sequence = state()
    before = sequence.table
    batch = ExtendBatch(CALLS, [(sequence, 20)])
    assert batch.call.request == cache.ExtendRequest(
        pool_id="e.1", items=[cache.ExtendItem(sequence_id="e.1.2.3", capacity_tokens=68, known_block_count=3)]
    )
    result = cache.ExtendResult(added=block_table((11, 1), (12, 1)), capacity_tokens=80)
    assert batch.outcomes(cache.ExtendResponse(results=[result])) == [None]
    assert (sequence.table.tolist(), sequence.capacity_tokens) == ([7, 8, 3, 11, 12], 80)
    assert before.tolist() == [7, 8, 3]


def test_an_extend_that_is_refused_leaves_the_table_alone() -> None:
    """The remedy, to preempt a sequence, is the caller's."""
    sequence = state()
    status = types_pb2.ItemStatus(code=8, reason=errors_pb2.ERROR_REASON_POOL_EXHAUSTED, message="full")
    reply = cache.ExtendResponse(results=[cache.ExtendResult(status=status, capacity_tokens=48)])
    (outcome,) = ExtendBatch(CALLS, [(sequence, 20)]).outcomes(reply)
    assert PoolExhausted is type(outcome)
    assert (sequence.table.tolist(), sequence.capacity_tokens) == ([7, 8, 3], 48)


def test_a_batch_has_one_item_a_sequence() -> None:
    """A second item would be built from the state before the first."""
    sequence = state()
    with pytest.raises(InvalidField, match="one item a sequence"):
        ExtendBatch(CALLS, [(sequence, 1), (sequence, 1)])


def test_shadows_are_remembered_until_they_are_switched_and_reported_once() -> None:
    """The canonical block takes the shadow's place; the next commit that succeeds tells the service."""
    sequence = state()
    message = cache.Shadow(position=1, block_id=21, generation=210)
    commit(sequence, cache.CommitResult(committed_tokens=32, shadows=[message]), 40)
    assert sequence.shadows == (Shadow(1, 21, 210),)

    before = sequence.table
    assert sequence.switch_shadows() == (1,)
    assert (sequence.table.tolist(), sequence.generations.tolist()) == ([7, 21, 3], [70, 210, 2**63])
    assert before.tolist() == [7, 8, 3]
    assert not sequence.shadows
    assert not sequence.switch_shadows()

    refused = types_pb2.ItemStatus(code=9, reason=errors_pb2.ERROR_REASON_SEQUENCE_BUSY)
    commit(sequence, cache.CommitResult(status=refused), 40)
    assert list(sequence.commit_item(40, ()).switched_positions) == [1]
    commit(sequence, cache.CommitResult(committed_tokens=32), 40)
    assert list(sequence.commit_item(40, ()).switched_positions) == []


@pytest.mark.parametrize(
    "failure", [DeadlineExceeded("no answer"), ServiceBug("broken"), asyncio.CancelledError(), KeyboardInterrupt()]
)
def test_a_commit_without_an_answer_is_to_be_carried_by_the_next(failure: BaseException) -> None:
    """C5: cursors have not moved; a commit that carries more is sent in two, and one that contradicts it is refused."""
    sequence = state()
    batch = CommitBatch.of(CALLS, [Commit(sequence, 40, [5, 6])])
    with pytest.raises(type(failure)):
        fail(batch, failure)
    assert (sequence.computed_tokens, sequence.token_count) == (16, 40)
    with pytest.raises(SequenceInDoubt):
        sequence.require_usable()
    sequence.slots(0, 16)
    for other in ((40, [5]), (40, [6, 5]), (40, [])):
        with pytest.raises(SequenceInDoubt, match="does not begin with its tokens"):
            Repeats(CALLS, [Commit(sequence, *other)])
    assert Repeats(CALLS, [Commit(sequence, 40, [5, 6])]).batch is None
    repeats = Repeats(CALLS, [Commit(sequence, 43, [5, 6, 7])])
    assert repeats.batch is not None
    assert repeats.batch.call.request == batch.call.request
    repeats.batch.outcomes(cache.CommitResponse(results=[cache.CommitResult(committed_tokens=32)]))
    ((_, computed_tokens, rest, _),) = repeats.rest()
    assert (computed_tokens, rest, sequence.token_count) == (43, array("I", [7]).tobytes(), 42)


def test_extra_keys_of_an_unanswered_commit_are_carried_too() -> None:
    """They belong to its tokens."""
    sequence = state()
    keys = [ExtraKey(40, b"a"), ExtraKey(41, b"b")]
    batch = CommitBatch.of(CALLS, [Commit(sequence, 16, [5], keys[:1])])
    with pytest.raises(DeadlineExceeded):
        fail(batch, DeadlineExceeded("no answer"))
    with pytest.raises(SequenceInDoubt):
        Repeats(CALLS, [Commit(sequence, 16, [5, 6], keys[1:])])
    repeats = Repeats(CALLS, [Commit(sequence, 16, [5, 6], keys)])
    assert repeats.batch is not None
    repeats.batch.outcomes(cache.CommitResponse(results=[cache.CommitResult(committed_tokens=16)]))
    assert repeats.rest()[0].extra_keys == keys[1:]
    assert [key.value for key in sequence.tail.extra_keys] == [b"a"]


@pytest.mark.parametrize(("computed_tokens", "new_tokens"), [(15, ()), (41, ()), (42, range(9))])
def test_a_commit_that_would_be_refused_is_not_told(computed_tokens: int, new_tokens: tuple[int, ...]) -> None:
    """C11: told as taken it would cost the whole sequence."""
    sequence = state()
    before = sequence.held()
    CommitBatch.of(CALLS, [Commit(sequence, computed_tokens, new_tokens)]).sending()
    assert sequence.held() == before
    CommitBatch.of(CALLS, [Commit(sequence, 42, [5, 6], [ExtraKey(40, b"a")])]).sending()
    held = sequence.held()
    assert (held.sequence.computed_tokens, held.sequence.token_count) == (42, 42)
    assert held.tail_token_ids == before.tail_token_ids + array("I", [5, 6]).tobytes()
    assert [key.value for key in held.extra_keys] == [b"a"]


def test_a_repeated_commit_reports_no_switch_for_another() -> None:
    """What it reports was told to the next process already; what was switched since then is still to be reported."""
    sequence = state()
    shadows = [cache.Shadow(position=position, block_id=10 + position, generation=9) for position in (0, 1)]
    commit(sequence, cache.CommitResult(committed_tokens=32, shadows=shadows[:1]), 40)
    sequence.switch_shadows()
    batch = CommitBatch.of(CALLS, [Commit(sequence, 41, [5])])
    batch.sending()
    sequence.held()
    sequence.resumed(cache.ResumeResult(committed_tokens=32, shadows=shadows[1:]))
    assert sequence.switch_shadows() == (1,)
    batch.outcomes(cache.CommitResponse(results=[cache.CommitResult(committed_tokens=32)]))
    assert list(sequence.commit_item(41, ()).switched_positions) == [1]


def test_a_refusal_leaves_no_doubt() -> None:
    """The service has said that nothing was changed."""
    sequence = state()
    batch = CommitBatch.of(CALLS, [Commit(sequence, 40)])
    with pytest.raises(PoolExhausted):
        fail(batch, PoolExhausted("full"))
    sequence.require_usable()


def test_a_sequence_that_has_ended_is_refused_here() -> None:
    """The mistake is found before it reaches the service, or others' blocks."""
    sequence = state()
    sequence.released(cache.ReleaseResponse(results=[cache.ReleaseResult(already_released=True)]))
    with pytest.raises(SequenceEnded):
        sequence.commit_item(40, ())
    with pytest.raises(SequenceEnded, match=r"e\.1\.2\.3"):
        sequence.slots(0, 16)


@pytest.mark.parametrize("computed_tokens", [2**70, "many", 20.0])
def test_values_that_a_field_cannot_hold_are_typed_errors(computed_tokens: Any) -> None:
    """protobuf's own TypeError and ValueError never reach the caller: the message names field, value and remedy."""
    with pytest.raises(InvalidField, match=r"^computed_tokens is .{2,30}, must be a whole number .*: pass an int$"):
        state().commit_item(computed_tokens, ())


def test_more_switches_than_one_commit_takes_are_reported_with_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service bounds what a call lists; a sequence of a million tokens may have that many shadows."""
    monkeypatch.setattr(sequence_state, "MAX_SWITCHED", 2)
    sequence = state()
    item = sequence.commit_item(40, ())
    shadows = [cache.Shadow(position=position, block_id=20 + position, generation=5) for position in range(3)]
    sequence.committed(item, cache.CommitResult(status=types_pb2.ItemStatus(), committed_tokens=32, shadows=shadows))
    sequence.switch_shadows()
    for reported in ([0, 1], [2], []):
        item = sequence.commit_item(40, ())
        assert list(item.switched_positions) == reported
        sequence.committed(item, cache.CommitResult(status=types_pb2.ItemStatus(), committed_tokens=32))
