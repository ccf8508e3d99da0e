"""Running sequences as columns, one row each, so that a token is appended to all of them at once.

A step reads and writes flat columns, by indices of numpy's own type and with values of the column's. At any other
access to some of its entries numpy lets another thread have the interpreter, and the step would wait until it gets it
back. With more than 500 entries numpy does so in any case.
"""

from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from kvharbor.client.runs import BlockRun

if TYPE_CHECKING:
    from kvharbor.client.sequence import Sequence

FIRST_ROWS = 64
FIRST_WIDTH = 64
# Columns about a row's last block: its place in the table, how many tokens it has, how many of these are told, and how
# many are told to be computed; blocks in the row's table; the block itself, and its generation's bits.
PLACE, OFFSET, TOLD, COMPUTED, BLOCK_COUNT, BLOCK, GENERATION = range(7)
Rows = npt.NDArray[np.intp]
Column = npt.NDArray[np.int64]
ScalarT = TypeVar("ScalarT", bound=np.generic)


class DecodeRows:
    """The columns. What is told is known to the service, or on its way to it.

    `cursors` are the columns above, one behind the other; `tokens` those of each row's last block.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.count = 0
        self.sequences: list[Sequence] = []
        self.cursors: npt.NDArray[np.int64] = np.zeros((GENERATION + 1, FIRST_ROWS), np.int64)
        self.tokens: npt.NDArray[np.uint32] = np.zeros((FIRST_ROWS, block_tokens), "<u4")
        self.tables: npt.NDArray[np.int32] = np.zeros((FIRST_ROWS, FIRST_WIDTH), np.int32)
        self.generations: npt.NDArray[np.uint64] = np.zeros((FIRST_ROWS, FIRST_WIDTH), np.uint64)
        self.numbers: Rows = np.arange(FIRST_ROWS)
        self._row_of: dict[int, int] = {}

    def row_of(self, sequence: "Sequence") -> int | None:
        """Returns a sequence's row, None where it has none."""
        return self._row_of.get(id(sequence))

    def add(self, sequence: "Sequence") -> int:
        """Gives a sequence the last row, as it is; all of its tokens are computed. Returns the row."""
        row, block_count = self.count, len(sequence.table)
        self._require_room(row + 1, block_count)
        # A full block is the last one until there is a token for the next.
        place = (sequence.token_count - 1) // self.block_tokens
        offset = sequence.token_count - place * self.block_tokens
        self.tables[row, :block_count] = sequence.table
        self.generations[row, :block_count] = sequence.generations
        generation = self.generations[row].view(np.int64)[place]
        self.cursors[:, row] = (place, offset, offset, offset, block_count, self.tables[row, place], generation)
        self.sequences.append(sequence)
        self._row_of[id(sequence)] = row
        self.count += 1
        return row

    def remove(self, row: int) -> None:
        """Gives the last row's sequence this row."""
        last = self.count - 1
        del self._row_of[id(self.sequences[row])]
        if row != last:
            for column in (self.cursors.T, self.tokens, self.tables, self.generations):
                column[row] = column[last]
            self.sequences[row] = self.sequences[last]
            self._row_of[id(self.sequences[row])] = row
        self.sequences.pop()
        self.count = last

    def full(self) -> Rows:
        """Returns the rows whose last block has no room."""
        full: Rows = (self.cursors[OFFSET, : self.count] == self.block_tokens).nonzero()[0]
        return full

    def append(self, rows: Rows | slice, tokens: npt.NDArray[np.uint32], numbers: Rows) -> None:
        """Adds a token to each of `rows`, which `numbers` are; there is room in their last blocks."""
        offsets = self.cursors[OFFSET]
        self.tokens.reshape(-1)[numbers * self.block_tokens + offsets[rows]] = tokens
        offsets[rows] += 1

    def lacking(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Tells of rows whose last block is full whether their table ends with it."""
        ends: npt.NDArray[np.bool_] = self.cursors[PLACE][rows] + 1 == self.cursors[BLOCK_COUNT][rows]
        return ends

    def turn(self, rows: Rows, lacking: npt.NDArray[np.bool_], blocks: BlockRun) -> None:
        """Goes on to the next block of each row's table, where it is lacking to one of `blocks`."""
        extended = rows[lacking]
        ends = self.cursors[BLOCK_COUNT][extended]
        if len(ends) and int(ends.max()) >= self.tables.shape[1]:
            self._require_room(self.count, int(ends.max()) + 1)
        places, _, _, _, block_counts, last, generations = self.cursors
        table, table_generations = self.tables.reshape(-1), self.generations.reshape(-1)
        width = self.tables.shape[1]
        at = extended * width + ends
        table[at] = blocks.block_ids.view(np.int32)
        table_generations[at] = blocks.generations
        block_counts[extended] = ends + 1
        after = places[rows] + 1
        places[rows] = after
        for column in (OFFSET, TOLD, COMPUTED):
            self.cursors[column][rows] = 0
        at = rows * width + after
        last[rows] = table[at].astype(np.int64)
        generations[rows] = table_generations[at].view(np.int64)

    def write_back(self, row: int) -> None:
        """Gives the sequence its table."""
        sequence, end = self.sequences[row], int(self.cursors[BLOCK_COUNT, row])
        sequence.table = self.tables[row, :end].copy()
        sequence.generations = self.generations[row, :end].copy()
        sequence.capacity_tokens = end * self.block_tokens

    def _require_room(self, row_count: int, width: int) -> None:
        rows, columns = self.tables.shape
        if row_count > rows or width > columns:
            rows, columns = _doubled(rows, row_count), _doubled(columns, width)
            self.cursors = _wider(self.cursors, len(self.cursors), rows)
            self.tokens = _wider(self.tokens, rows, self.block_tokens)
            self.tables = _wider(self.tables, rows, columns)
            self.generations = _wider(self.generations, rows, columns)
            self.numbers = np.arange(rows)


def _wider(column: npt.NDArray[ScalarT], rows: int, columns: int) -> npt.NDArray[ScalarT]:
    wider = np.zeros((rows, columns), column.dtype)
    wider[: column.shape[0], : column.shape[1]] = column
    return wider


def _doubled(now: int, wanted: int) -> int:
    while now < wanted:
        now *= 2
    return now
