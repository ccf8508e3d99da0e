"""Running sequences as columns, one row each, so that a token is appended to all of them at once."""

from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from kvharbor.client.runs import BlockRun

if TYPE_CHECKING:
    from kvharbor.client.sequence import Sequence

FIRST_ROWS = 64
FIRST_WIDTH = 64
# Columns of `cursors`, about a row's last block: the first of its tokens, how many it has, how many of these are told,
# and how many are told to be computed; blocks in the row's table; the block itself, and its generation's bits.
START, OFFSET, TOLD, COMPUTED, BLOCK_COUNT, BLOCK, GENERATION = range(7)
_KEPT = np.array([1, 0, 0, 0, 1, 0, 0])
Rows = npt.NDArray[np.intp]
Cursors = npt.NDArray[np.int64]
ScalarT = TypeVar("ScalarT", bound=np.generic)


class DecodeRows:
    """The columns. What is told is known to the service, or on its way to it.

    Cursors are one matrix, as each access to columns of some rows costs about the same however much it reads.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.count = 0
        self.sequences: list[Sequence] = []
        self.cursors: Cursors = np.zeros((FIRST_ROWS, len(_KEPT)), np.int64)
        self.tokens: npt.NDArray[np.uint32] = np.zeros((FIRST_ROWS, block_tokens), np.uint32)
        self.tables: npt.NDArray[np.int32] = np.zeros((FIRST_ROWS, FIRST_WIDTH), np.int32)
        self.generations: npt.NDArray[np.uint64] = np.zeros((FIRST_ROWS, FIRST_WIDTH), np.uint64)
        self.numbers: Rows = np.arange(FIRST_ROWS)
        self._next = np.array([block_tokens, 0, 0, 0, 0, 0, 0])
        self._row_of: dict[int, int] = {}

    def row_of(self, sequence: "Sequence") -> int | None:
        """Returns a sequence's row, None where it has none."""
        return self._row_of.get(id(sequence))

    def add(self, sequence: "Sequence") -> int:
        """Gives a sequence the last row, as it is; all of its tokens are computed. Returns the row."""
        row, block_count = self.count, len(sequence.table)
        self._require_room(row + 1, block_count)
        # A full block is the last one until there is a token for the next.
        position = (sequence.token_count - 1) // self.block_tokens
        start = position * self.block_tokens
        offset = sequence.token_count - start
        self.cursors[row, :BLOCK] = (start, offset, offset, offset, block_count)
        self.tables[row, :block_count] = sequence.table
        self.generations[row, :block_count] = sequence.generations
        self.cursors[row, BLOCK] = self.tables[row, position]
        self.cursors[row, GENERATION] = self.generations[row, position : position + 1].view(np.int64)[0]
        self.sequences.append(sequence)
        self._row_of[id(sequence)] = row
        self.count += 1
        return row

    def remove(self, row: int) -> None:
        """Gives the last row's sequence this row."""
        last = self.count - 1
        del self._row_of[id(self.sequences[row])]
        if row != last:
            for column in (self.cursors, self.tokens, self.tables, self.generations):
                column[row] = column[last]
            self.sequences[row] = self.sequences[last]
            self._row_of[id(self.sequences[row])] = row
        self.sequences.pop()
        self.count = last

    def full(self) -> Rows:
        """Returns the rows whose last block has no room."""
        return np.flatnonzero(self.cursors[: self.count, OFFSET] == self.block_tokens)

    def append(self, rows: Rows | slice, tokens: npt.NDArray[np.uint32], numbers: Rows) -> None:
        """Adds a token to each of `rows`, which `numbers` are; there is room in their last blocks."""
        self.tokens[numbers, self.cursors[rows, OFFSET]] = tokens
        self.cursors[rows, OFFSET] += 1

    def lacking(self, cursors: Cursors) -> npt.NDArray[np.bool_]:
        """Tells of rows whose last block is full whether their table ends with it."""
        ends: npt.NDArray[np.bool_] = (
            cursors[:, START] + self.block_tokens == cursors[:, BLOCK_COUNT] * self.block_tokens
        )
        return ends

    def turn(self, rows: Rows, cursors: Cursors, lacking: npt.NDArray[np.bool_], blocks: BlockRun) -> None:
        """Goes on to the next block of each row's table, where it is lacking to one of `blocks`."""
        after = cursors * _KEPT + self._next
        extended, growing = (rows, after) if lacking.all() else (rows[lacking], after[lacking])
        ends = growing[:, BLOCK_COUNT]
        if len(ends) and int(ends.max()) >= self.tables.shape[1]:
            self._require_room(self.count, int(ends.max()) + 1)
        self.tables[extended, ends] = blocks.block_ids
        self.generations[extended, ends] = blocks.generations
        after[:, BLOCK_COUNT] += lacking
        positions = after[:, START] // self.block_tokens
        after[:, BLOCK] = self.tables[rows, positions]
        after[:, GENERATION] = self.generations[rows, positions].view(np.int64)
        self.cursors[rows] = after

    def write_back(self, row: int) -> None:
        """Gives the sequence its table."""
        sequence, end = self.sequences[row], int(self.cursors[row, BLOCK_COUNT])
        sequence.table = self.tables[row, :end].copy()
        sequence.generations = self.generations[row, :end].copy()
        sequence.capacity_tokens = end * self.block_tokens

    def _require_room(self, row_count: int, width: int) -> None:
        rows, columns = self.tables.shape
        if row_count > rows or width > columns:
            rows, columns = _doubled(rows, row_count), _doubled(columns, width)
            self.cursors = _wider(self.cursors, rows, self.cursors.shape[1])
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
