"""Cells: chains that are there or not, in a heap that refuses when it is full."""

import pytest

from kvharbor.pool.cells import CELL_BYTES, NO_CELL, CellKind, Cells

COUNT = 8


def make() -> tuple[Cells, bytearray]:
    memory = bytearray(COUNT * CELL_BYTES)
    return Cells(memoryview(memory)), memory


@pytest.mark.parametrize("size", [0, 1, 95, 96, 97, 500])
def test_a_value_of_any_length_is_found_by_the_next_process(size: int) -> None:
    """What was written is read back whole, with its kind and both words."""
    cells, memory = make()
    value = bytes(range(256)) * 2
    cell = cells.write(CellKind.PIN, value[:size], (7, 1 << 63))
    (entry,) = Cells(memoryview(memory)).entries()
    assert (entry.cell, entry.kind, entry.value, entry.words) == (cell, CellKind.PIN, value[:size], (7, 1 << 63))


def test_a_full_heap_refuses_and_counts() -> None:
    """[L8] What does not fit is not there, and what is there stays."""
    cells, _ = make()
    first = cells.write(CellKind.EXTRAS, bytes(5 * 96))
    assert cells.write(CellKind.EXTRAS, bytes(3 * 96)) == NO_CELL
    assert (cells.refused_count, len(list(cells.entries()))) == (1, 1)
    cells.free(first)
    assert cells.write(CellKind.EXTRAS, bytes(7 * 96)) != NO_CELL


def test_a_freed_chain_is_used_again() -> None:
    """[L7] One store frees a chain; all of its cells can be taken."""
    cells, memory = make()
    for _ in range(50):
        cells.free(cells.write(CellKind.EXTRAS, bytes(6 * 96)))
    assert list(cells.entries()) == []
    assert list(Cells(memoryview(memory)).entries()) == []


def test_a_word_changes_without_the_rest() -> None:
    """A word of a head is replaced alone, and the value is as whole as before."""
    cells, _ = make()
    cell = cells.write(CellKind.PIN, b"value", (1, 2))
    cells.set_word(cell, 1, 99)
    entry = cells.read(cell)
    assert entry is not None
    assert (entry.value, entry.words) == (b"value", (1, 99))


def test_the_next_process_frees_what_nobody_names() -> None:
    """Chains that are not kept are gone, and their cells are free."""
    cells, memory = make()
    kept = cells.write(CellKind.EXTRAS, b"a" * 100)
    cells.write(CellKind.EXTRAS, b"b" * 100)
    after = Cells(memoryview(memory))
    after.keep_only([kept])
    assert [entry.value for entry in after.entries()] == [b"a" * 100]
    assert after.write(CellKind.EXTRAS, bytes(5 * 96)) != NO_CELL
    assert after.read(kept) is not None


def test_a_scribbled_chain_is_not_there() -> None:
    """Any byte of a value or of its head changed, and the chain is gone."""
    cells, memory = make()
    cell = cells.write(CellKind.EXTRAS, b"x" * 100)
    places = [cell * CELL_BYTES + offset for offset in (0, 4, 8, 12, 32, 127)]
    places += [(cell + 1) * CELL_BYTES + offset for offset in (12, 32, 35)]
    for place in places:
        scribbled = bytearray(memory)
        scribbled[place] ^= 0x55
        assert list(Cells(memoryview(scribbled)).entries()) == []


def test_memory_is_touched_as_it_is_used() -> None:
    """A heap for a million things costs nothing until there are some: the end of it stays untouched."""
    cells, memory = make()
    cells.write(CellKind.EXTRAS, b"x")
    assert not any(memory[2 * CELL_BYTES :])
