"""A decode batch against a fake of the service, and against plain arithmetic: its steps, its room, who is in it."""

import time
from typing import Any

import pytest

from decoding_here import prefilled, tokens_of
from fake_service import FakeService
from fake_stream import blocks_of
from integration.client_worker import BLOCK_TOKENS
from kvharbor.client import Credits, DecodeBatch, InvalidField, Pool, PoolExhausted, SequenceBusy, SequenceEnded
from kvharbor.v1 import cache_service_pb2 as cache
from waiting import until


@pytest.fixture
def block_count() -> int:
    return 1024


@pytest.mark.parametrize("token_count", [1, 15, 16, 17, 31, 32, 40])
def test_a_step_appends_where_the_tokens_belong(
    service: FakeService, pool: Pool, batch: DecodeBatch, token_count: int
) -> None:
    """Slots, table and counts are as in a sequence that is extended and committed by hand."""
    sequence = prefilled(pool, token_count)
    batch.join(sequence)
    slots = []
    for number in range(50):
        step = batch.step([1000 + number])
        assert (step.rows.tolist(), dict(step.refused)) == ([0], {})
        slots.append((int(step.slots[0][0]), int(step.slots[1][0])))
    assert batch.token_counts.tolist() == [token_count + 50]
    table = batch.tables[0, : batch.block_counts[0]].tolist()
    positions = range(token_count, token_count + 50)
    assert slots == [(table[at // BLOCK_TOKENS], at % BLOCK_TOKENS) for at in positions]
    batch.leave(sequence)
    assert sequence.table.tolist() == table
    assert (sequence.token_count, sequence.computed_tokens) == (token_count + 50, token_count + 49)
    assert tokens_of(service, sequence) == [1000 + number for number in range(50)]
    known = service.sequences[sequence.id]
    assert (known.token_count, known.computed_tokens) == (token_count + 50, token_count + 49)
    assert [block for block, _ in blocks_of(known.table)] == table
    assert sequence.commit(token_count + 50).committed_tokens == (token_count + 50) // BLOCK_TOKENS * BLOCK_TOKENS
    sequence.release()


def test_a_block_is_committed_by_the_step_after_it_is_full(
    service: FakeService, pool: Pool, batch: DecodeBatch
) -> None:
    """C20: the KV of the last token is written by the pass that follows its step."""
    sequence = prefilled(pool, 10)
    batch.join(sequence)
    for number in range(6):
        batch.step([number])
    pool.blocks.flush()
    assert service.blocks.of_kind("commit") == []
    batch.step([6])
    pool.blocks.flush()
    ((item,),) = [request.items for request in service.blocks.of_kind("commit")]
    assert (item.computed_tokens, item.known_token_count, len(item.new_token_ids) // 4) == (16, 10, 6)
    assert [block for block, _ in blocks_of(item.written)] == [sequence.table[0]]
    ((appended, _),) = blocks_of(item.appended)
    assert batch.tables[0, :2].tolist() == [sequence.table[0], appended]
    batch.release([sequence])


def test_a_batch_that_steps_keeps_its_credits(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """C19: also while no row needs any of them; after a pause the first step has them fetched again at once."""
    stock = Credits(pool, 4, idle_s=3600)
    batch, sequence = DecodeBatch(pool, stock), prefilled(pool, 3)
    batch.join(sequence)
    until(lambda: len(stock) == 4)
    began_at_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began_at_s + 3000)
    batch.step([1])
    monkeypatch.setattr(time, "monotonic", lambda: began_at_s + 6000)
    stock.return_idle()
    assert len(stock) == 4
    monkeypatch.setattr(time, "monotonic", lambda: began_at_s + 9000)
    stock.return_idle()
    assert len(stock) == 0
    batch.step([2])
    monkeypatch.undo()
    until(lambda: len(stock) == 4)
    batch.release([sequence])
    stock.close()


def test_room_that_was_reserved_is_used_first(service: FakeService, pool: Pool, batch: DecodeBatch) -> None:
    """No credit is taken for it."""
    sequence = prefilled(pool, 10, reserve_tokens=30)
    batch.join(sequence)
    for number in range(30):
        batch.step([number])
    pool.blocks.flush()
    assert batch.tables[0, :3].tolist() == sequence.table.tolist()
    assert [len(blocks_of(item.appended)) for each in service.blocks.of_kind("commit") for item in each.items] == [0, 0]
    batch.release([sequence])


def test_sequences_come_and_go(service: FakeService, pool: Pool, batch: DecodeBatch) -> None:
    """The last row takes the place of the one that leaves, with all that it has."""
    made = [prefilled(pool, count) for count in (5, 20, 33)]
    assert [batch.join(sequence) for sequence in made] == [0, 1, 2]
    sent: dict[str, list[int]] = {sequence.id: [] for sequence in made}

    def step(base: int) -> None:
        tokens = [base + row for row in range(len(batch))]
        batch.step(tokens)
        for sequence, token in zip(batch.sequences, tokens, strict=True):
            sent[sequence.id].append(token)

    for base in range(0, 200, 10):
        step(base)
    batch.leave(made[0])
    assert batch.sequences == (made[2], made[1])
    for base in range(200, 400, 10):
        step(base)
    late = prefilled(pool, 16)
    sent[late.id] = []
    batch.join(late)
    step(500)
    batch.sync()
    for sequence in (*made, late):
        assert tokens_of(service, sequence) == sent[sequence.id]
        assert sequence.token_count == service.sequences[sequence.id].token_count
    batch.release(batch.sequences)
    made[0].release()
    pool.blocks.flush()
    assert (len(batch), service.sequences) == (0, {})


def test_wide_and_tall_batches_grow(pool: Pool, batch: DecodeBatch) -> None:
    """Rows and tables beyond what the columns begin with keep what they have."""
    made = [prefilled(pool, 1 + count % 3) for count in range(100)]
    for sequence in made:
        batch.join(sequence)
    assert batch.tables[:, 0].tolist() == [int(sequence.table[0]) for sequence in made]
    long = prefilled(pool, 16 * 130)
    row = batch.join(long)
    assert batch.tables[row, :130].tolist() == long.table.tolist()
    assert batch.tables[:100, 0].tolist() == [int(sequence.table[0]) for sequence in made]
    batch.release(batch.sequences)


def test_a_sequence_in_a_batch_is_the_batchs(pool: Pool, batch: DecodeBatch) -> None:
    """C20: what would not be in order with its steps is refused here; a release is one of the batch."""
    sequence = prefilled(pool, 10)
    batch.join(sequence)
    for use in (
        lambda: sequence.commit(10),
        lambda: sequence.extend(1),
        lambda: sequence.fork(1),
        lambda: sequence.handoff(10),
        sequence.switch_shadows,
        lambda: batch.join(sequence),
    ):
        with pytest.raises(SequenceBusy, match="DecodeBatch"):
            use()
    sequence.release()
    assert (sequence.ended, len(batch)) == (True, 0)
    with pytest.raises(InvalidField, match="join it first"):
        batch.leave(sequence)


def test_what_is_not_computed_cannot_join(pool: Pool, batch: DecodeBatch) -> None:
    """The first step would call it computed."""
    sequence = pool.allocate(range(10))
    with pytest.raises(InvalidField, match="pass tokens that are not to `step`"):
        batch.join(sequence)
    sequence.commit(10)
    batch.join(sequence)
    with pytest.raises(InvalidField, match="token_ids is 2, must be one token a row, 1"):
        batch.step([1, 2])
    with pytest.raises(InvalidField):
        batch.step([-1])
    batch.release([sequence])


# No room


def test_a_row_without_a_block_is_refused_alone(service: FakeService, pool: Pool) -> None:
    """C20: nothing of it is done, and it goes on once another has made room."""
    service.blocks.free_count = 1
    credits = Credits(pool, 1)
    until(lambda: len(credits) == 1)
    batch = DecodeBatch(pool, credits)
    made = [prefilled(pool, 16) for _ in range(3)]
    for sequence in made[:2]:
        batch.join(sequence)
    roomy = prefilled(pool, 8)
    batch.join(roomy)
    step = batch.step([1, 2, 3])
    assert step.rows.tolist() == [0, 2]
    assert [(row, type(error)) for row, error in step.refused.items()] == [(1, PoolExhausted)]
    assert "preempt a sequence" in str(step.refused[1])
    assert batch.token_counts.tolist() == [17, 16, 9]
    assert step.slots[1].tolist() == [0, 8]
    pool.blocks.flush()
    assert tokens_of(service, made[1]) == []
    service.blocks.free_count = 1
    step = batch.step([4, 5, 6])
    assert (step.rows.tolist(), dict(step.refused)) == ([0, 1, 2], {})
    assert batch.token_counts.tolist() == [18, 17, 10]
    batch.release(batch.sequences)
    credits.close()
    made[2].release()


def test_a_preempted_row_leaves_with_all_its_tokens(service: FakeService, pool: Pool) -> None:
    """And can be computed again from them, or go on."""
    service.blocks.free_count = 0
    credits = Credits(pool, 1)
    batch = DecodeBatch(pool, credits)
    sequence = prefilled(pool, 10)
    batch.join(sequence)
    for number in range(6):
        batch.step([number])
    assert [*batch.step([7]).refused] == [0]
    batch.leave(sequence)
    assert (sequence.token_count, sequence.computed_tokens) == (16, 15)
    assert tokens_of(service, sequence) == [0, 1, 2, 3, 4, 5]
    sequence.release()
    credits.close()


def test_a_sequence_that_is_released_by_name_is_refused(pool: Pool, batch: DecodeBatch) -> None:
    """Its blocks may be another's already: it gets no slot."""
    sequence = prefilled(pool, 16, group="g")
    batch.join(sequence)
    assert pool.release(group="g") == 1
    step = batch.step([1])
    assert (len(step.rows), type(step.refused[0])) == (0, SequenceEnded)
    batch.leave(sequence)
    assert len(batch) == 0


def test_shadows_are_taken_in(service: FakeService, pool: Pool, batch: DecodeBatch) -> None:
    """They are the sequence's to switch once it has left."""
    sequence = prefilled(pool, 16)
    batch.join(sequence)
    answer = service.held.answer

    def with_shadow(method: str, request: Any) -> Any:
        reply = answer(method, request)
        if method == "Commit" and request.items[0].computed_tokens == 32:
            reply.results[0].shadows.append(cache.Shadow(position=1, block_id=500, generation=3))
        return reply

    service.held.answer = with_shadow  # type: ignore[method-assign]
    for number in range(17):
        batch.step([number])
    batch.leave(sequence)
    assert [shadow.block_id for shadow in sequence.shadows] == [500]
    sequence.commit(sequence.token_count)
    assert sequence.switch_shadows() == (1,)
    assert sequence.table[1] == 500
    # The batch's own commits do not report it, so it is reported before.
    batch.join(sequence)
    assert service.calls["Commit"][-1].items[0].switched_positions == [1]
    assert batch.tables[0, 1] == 500
    batch.release([sequence])
