"""Commits of a decode batch that are refused while a sequence leaves, and sequences that join again after one."""

import threading
from array import array

import pytest

from decoding_here import prefilled
from fake_process import refused_item
from fake_service import FakeService
from fake_stream import blocks_of
from kvharbor.client import CursorOutOfRange, DeadlineExceeded, DecodeBatch, HarborError, Pool
from moments import once, wait_for
from waiting import until


@pytest.fixture
def block_count() -> int:
    return 1024


def test_a_refusal_that_no_step_has_told_is_told_when_its_row_leaves(
    service: FakeService, pool: Pool, batch: DecodeBatch
) -> None:
    """C20: its last tokens are not with the service, which nobody would learn."""
    sequence = prefilled(pool, 10)
    batch.join(sequence)
    batch.step([1])
    service.sequences[sequence.id].token_count = 99
    with pytest.raises(CursorOutOfRange):
        batch.leave(sequence)
    assert (len(batch), sequence.token_count) == (0, 10)
    sequence.release()


def test_a_refusal_of_a_whole_request_keeps_nobody_waiting(
    service: FakeService, pool: Pool, batch: DecodeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C20: it is each row's."""
    sequences = [prefilled(pool, 10), prefilled(pool, 10)]
    for sequence in sequences:
        batch.join(sequence)
    batch.step([1, 2])
    monkeypatch.setattr(service.blocks, "_commit", lambda _: refused_item("POOL_NOT_FOUND", 5))
    for sequence in sequences:
        with pytest.raises(HarborError, match="POOL_NOT_FOUND"):
            batch.leave(sequence, timeout_s=5)
    assert len(batch) == 0
    for sequence in sequences:
        sequence.release()


def test_what_follows_a_refused_commit_is_not_told(service: FakeService, pool: Pool, batch: DecodeBatch) -> None:
    """C11: its tokens would stand where those of the refused one belong, with the KV of these."""
    sequence = prefilled(pool, 10)
    batch.join(sequence)
    served, given_up = threading.Event(), threading.Event()
    once(service.blocks.before, "commit", wait_for(served))
    for token in (1, 2):
        batch.step([token])
        with pytest.raises(DeadlineExceeded):
            batch.sync(timeout_s=0.01)
    service.sequences[sequence.id].token_count = 99
    once(service.blocks.after, "commit", lambda: once(service.blocks.after, "commit", wait_for(given_up)))
    served.set()
    until(lambda: batch.step([3]).refused)
    service.kill()
    given_up.set()
    service.begin()
    (told,) = service.wait_until_resumed().sequences
    assert (told.sequence.computed_tokens, told.sequence.token_count) == (10, 10)
    assert told.tail_token_ids == array("I", range(10)).tobytes()
    batch.release([sequence])


def test_a_row_that_was_refused_joins_again_as_any_other(service: FakeService, pool: Pool, batch: DecodeBatch) -> None:
    """C20: nothing of the refusal is left, neither its error nor the block that it was to append."""
    sequence = prefilled(pool, 16)
    batch.join(sequence)
    service.sequences[sequence.id].token_count = 99
    batch.step([1])
    pool.blocks.flush()
    assert [*batch.step([2]).refused] == [0]
    batch.leave(sequence)
    service.sequences[sequence.id].token_count = 16
    batch.join(sequence)
    for number in range(20):
        assert not batch.step([number]).refused
    table = batch.tables[0, : batch.block_counts[0]].tolist()
    batch.leave(sequence)
    assert (sequence.table.tolist(), sequence.token_count) == (table, 36)
    assert [block for block, _ in blocks_of(service.sequences[sequence.id].table)] == table
    sequence.release()
