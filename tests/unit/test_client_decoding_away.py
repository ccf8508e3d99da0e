"""A decode batch over the death of the process, and over commits that are refused [C20]."""

import threading

import numpy as np
import pytest

from decoding_here import prefilled
from fake_process import refused_item
from fake_service import FakeService
from fake_stream import blocks_of
from integration.client_worker import BLOCK_TOKENS, LAYOUT
from kvharbor.client import Credits, CursorOutOfRange, DecodeBatch, EpochEnded, Pool, SequenceLost, ServiceAway, connect
from moments import wait, wait_for
from waiting import until


@pytest.fixture
def block_count() -> int:
    return 1024


@pytest.mark.parametrize("moment", ["before", "after"])
def test_commits_without_an_answer_are_told_with_their_sequences(
    service: FakeService, pool: Pool, batch: DecodeBatch, moment: str
) -> None:
    """C20: whether they have taken effect or not; with the tokens of blocks that are not full, and the new blocks."""
    made = [prefilled(pool, count) for count in (10, 16, 30)]
    for sequence in made:
        batch.join(sequence)
    go_on = threading.Event()
    hooks = service.blocks.before if moment == "before" else service.blocks.after

    hooks["commit"] = wait_for(go_on)
    sent = np.arange(40 * 3).reshape(40, 3)
    for tokens in sent[:39]:
        assert not batch.step(tokens).refused
    expected = {
        sequence.id: (batch.tables[row, : batch.block_counts[row]].tolist(), sent[:39, row].tolist())
        for row, sequence in enumerate(made)
    }
    service.kill()
    go_on.set()
    hooks.clear()
    service.begin()
    told = service.wait_until_resumed()
    for held in told.sequences:
        table, new_tokens = expected[held.sequence.sequence_id]
        assert [block for block, _ in blocks_of(held.sequence.table)] == table
        assert held.sequence.computed_tokens == held.sequence.token_count - 1
        assert np.frombuffer(held.tail_token_ids, "<u4").tolist()[-39:] == new_tokens
    named = {block for held in told.sequences for block in blocks_of(held.sequence.table)}
    assert not named & {*blocks_of(told.blocks)}
    assert not batch.step(sent[39]).refused
    batch.sync()
    for row, sequence in enumerate(made):
        assert sequence.token_count == service.sequences[sequence.id].token_count == batch.token_counts[row]
    batch.release(made)
    pool.blocks.flush()
    assert service.sequences == {}


def test_steps_go_on_while_the_service_is_away(service: FakeService, pool: Pool, batch: DecodeBatch) -> None:
    """As long as the credits last; then a row waits for the service, and nothing else is lost."""
    sequence = prefilled(pool, 16)
    batch.join(sequence)
    service.kill()
    until(lambda: not pool.link.standing.settled(even_away=False))
    refused = None
    steps = 0
    while refused is None:
        refused = batch.step([steps]).refused.get(0)
        steps += 1
    assert type(refused) is ServiceAway
    assert steps == 64 * BLOCK_TOKENS + 1
    with pytest.raises(ServiceAway):
        batch.leave(sequence, timeout_s=0.01)
    service.begin()
    service.wait_until_resumed()
    until(lambda: not batch.step([7]).refused)
    batch.leave(sequence)
    assert sequence.token_count == service.sequences[sequence.id].token_count == 16 + steps
    sequence.release()


def test_a_release_while_the_service_is_away_publishes_what_is_full(
    service: FakeService, pool: Pool, batch: DecodeBatch
) -> None:
    """C11: it is named once more, with all that was committed, and released then."""
    sequence = prefilled(pool, 16)
    batch.join(sequence)
    service.kill()
    until(lambda: not pool.link.standing.settled(even_away=False))
    for number in range(20):
        batch.step([number])
    sequence.release()
    service.begin()
    (held,) = service.wait_until_resumed().sequences
    assert (held.sequence.sequence_id, held.sequence.computed_tokens) == (sequence.id, 32)
    until(lambda: not service.sequences)


def test_a_sequence_that_the_next_process_refuses_is_refused_alone(
    service: FakeService, pool: Pool, batch: DecodeBatch
) -> None:
    """The others go on; it leaves without a call."""
    lost, kept = prefilled(pool, 16), prefilled(pool, 16)
    batch.join(lost)
    batch.join(kept)
    service.held.refuse_resume[lost.id] = refused_item("STALE_GENERATION", 9)
    service.restart()
    service.wait_until_resumed()
    until(lambda: lost.ended)
    step = batch.step([1, 2])
    assert (step.rows.tolist(), type(step.refused[0])) == ([1], SequenceLost)
    batch.leave(lost)
    assert batch.sequences == (kept,)
    batch.release([kept])


def test_a_new_epoch_ends_every_row(service: FakeService) -> None:
    """Each is refused until it leaves."""
    epochs: list[str] = []
    with connect(service.target, on_epoch=lambda *pair: epochs.append(pair[1])) as harbor:
        pool = harbor.open_pool("p", LAYOUT)
        credits = Credits(pool, 8)
        batch = DecodeBatch(pool, credits)
        sequence = prefilled(pool, 16)
        batch.join(sequence)
        service.new_epoch()
        until(lambda: epochs)
        until(lambda: sequence.ended)
        step = batch.step([1])
        assert (len(step.rows), type(step.refused[0])) == (0, EpochEnded)
        batch.release([sequence])
        assert len(batch) == 0
        credits.close()


def test_a_refused_commit_refuses_its_row_until_it_leaves(
    service: FakeService, pool: Pool, batch: DecodeBatch, credits: Credits
) -> None:
    """C20: its blocks stay with it till then, as its forward passes may still write to them."""
    broken, kept = prefilled(pool, 16), prefilled(pool, 16)
    batch.join(broken)
    batch.join(kept)
    service.sequences[broken.id].token_count = 99
    assert not batch.step([1, 2]).refused
    pool.blocks.flush()
    taken = [*map(int, batch.tables[:, 1])]
    owned = {block for block, _ in service.blocks.own}
    assert taken[0] in owned
    step = batch.step([3, 4])
    assert (step.rows.tolist(), type(step.refused[0])) == ([1], CursorOutOfRange)
    batch.leave(broken)
    pool.blocks.flush()
    assert taken[0] not in {block for block, _ in service.blocks.own}
    assert (len(broken.table), broken.token_count) == (1, 16)
    batch.release([kept])
    broken.release()


def test_a_commit_that_is_refused_behind_its_row_gives_its_block_back(
    service: FakeService, pool: Pool, batch: DecodeBatch
) -> None:
    """C20: the row has been released before the answer has come, so nobody else would."""
    answered, released = threading.Event(), threading.Event()

    def refuse() -> None:
        service.sequences[sequence.id].token_count = 99
        answered.set()
        wait(released)

    sequence = prefilled(pool, 16)
    batch.join(sequence)
    service.blocks.before["commit"] = refuse
    batch.step([1])
    taken = int(batch.tables[0, 1])
    wait(answered)
    batch.release([sequence])
    released.set()
    pool.blocks.flush()
    pool.blocks.flush()
    assert taken not in {block for block, _ in service.blocks.own}
