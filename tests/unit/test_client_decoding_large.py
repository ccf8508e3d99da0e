"""Decode batches that step with more rows, and to longer tables, than their columns begin with."""

import pytest

from decoding_here import prefilled, tokens_of
from fake_service import FakeService
from integration.client_worker import BLOCK_TOKENS
from kvharbor.client import DecodeBatch, Pool
from kvharbor.client.decode_rows import FIRST_ROWS, FIRST_WIDTH


@pytest.fixture
def block_count() -> int:
    return 1024


def test_every_one_of_many_rows_gets_its_token(service: FakeService, pool: Pool, batch: DecodeBatch) -> None:
    """C20: rows that join when the columns are full are stepped as the first ones are."""
    made = [prefilled(pool, 3) for _ in range(FIRST_ROWS + 6)]
    for sequence in made:
        batch.join(sequence)
    step = batch.step(range(100, 100 + len(made)))
    assert step.rows.tolist() == [*range(len(made))]
    assert step.slots[0].tolist() == [int(sequence.table[0]) for sequence in made]
    batch.sync()
    assert [tokens_of(service, sequence) for sequence in made] == [[100 + row] for row in range(len(made))]
    batch.release(made)


def test_a_table_grows_by_steps_beyond_its_columns(pool: Pool, batch: DecodeBatch) -> None:
    """C20: its next block is not taken for the first one of the row behind it."""
    long, behind = prefilled(pool, FIRST_WIDTH * BLOCK_TOKENS), prefilled(pool, 3)
    before, first = long.table.tolist(), behind.table.tolist()
    for sequence in (long, behind):
        batch.join(sequence)
    step = batch.step([1, 2])
    assert batch.block_counts.tolist() == [FIRST_WIDTH + 1, 1]
    assert batch.tables[1, :1].tolist() == first
    assert batch.tables[0, :FIRST_WIDTH].tolist() == before
    assert step.slots[0].tolist() == [int(batch.tables[0, FIRST_WIDTH]), *first]
    batch.leave(long)
    assert long.table.tolist()[:-1] == before
    assert batch.tables[0, :1].tolist() == first
    long.release()
    batch.release([behind])
