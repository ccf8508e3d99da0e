"""The way to serve: rows of any lengths packed end to end, attention over the blocks where they lie.

Nothing is padded, so no row sees another and no work is spent on padding: the model runs on one row of
`sum(new tokens)` tokens with explicit positions, and only attention knows where one sequence ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvharbor.engines.transformers.cache import PoolLayer, mark
from kvharbor.engines.transformers.errors import AttentionUnsupported
from kvharbor.engines.transformers.kernel import (
    FOLD_RUNS,
    Partial,
    attend_all,
    attend_causal,
    fold,
    merge,
)
from kvharbor.engines.transformers.pieces import Piece, PoolWindow
from kvharbor.engines.transformers.step import Row, Step


@dataclass(frozen=True, slots=True)
class RowPieces:
    """Where a row's queries are in the pack, `[first, last)`, and the pieces that all of them see."""

    first: int
    last: int
    pieces: list[Piece]


@dataclass(frozen=True, slots=True)
class PackedStep(Step):
    """Rows end to end in one row of the model's."""

    rows: list[RowPieces]


def packed_step(window: PoolWindow, rows: Sequence[Row]) -> PackedStep:
    """Lays rows end to end and cuts their histories into views, once for all layers."""
    positions = np.concatenate([np.arange(row.start, row.end) for row in rows])
    blocks = [row.table[np.arange(row.start, row.end) // window.block_tokens] for row in rows]
    ends = np.cumsum([len(row.token_ids) for row in rows])
    spans = zip(rows, (ends - [len(row.token_ids) for row in rows]).tolist(), ends.tolist(), strict=True)
    return PackedStep(
        input_ids=torch.tensor([[token for row in rows for token in row.token_ids]]),
        position_ids=torch.from_numpy(positions)[None],
        attention_mask=None,
        last_positions=torch.from_numpy(ends - 1),
        history_tokens=0,
        blocks=torch.from_numpy(np.concatenate(blocks).astype(np.int64)),
        offsets=torch.from_numpy(positions % window.block_tokens),
        rows=[RowPieces(first, last, window.pieces(row.table, _seen_by_all(row))) for row, first, last in spans],
    )


def _seen_by_all(row: Row) -> int:
    # A single query sees its own token too, so decoding needs no causal part and, on one run, no merge.
    return row.end if len(row.token_ids) == 1 else row.start


class ViewLayer(PoolLayer):  # type: ignore[no-untyped-call]
    """Leaves K and V in the blocks; attention asks `attend` for its output."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Writes the new tokens in place and returns them, marked with this layer for attention to find.

        Marks on the tensors reach attention in every model, where keywords through `forward` reach it in
        most, and show that it gets K and V as they were cached.
        """
        if key_states.shape[0] != 1:
            raise AttentionUnsupported("padded batches", f"{key_states.shape[0]} rows", "pack the rows into one")
        self.write(key_states[0].transpose(0, 1), value_states[0].transpose(0, 1))
        mark(self, key_states, value_states)
        return key_states, value_states

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Returns `[1, query head, token, dim]`; `key` and `value` are the new tokens, as written."""
        rows = self.step.rows
        if len(rows) == 1:
            return self._attend_row(rows[0], query, (key, value), scale)
        return torch.cat(
            [
                self._attend_row(
                    row,
                    query[:, :, row.first : row.last],
                    (key[:, :, row.first : row.last], value[:, :, row.first : row.last]),
                    scale,
                )
                for row in rows
            ],
            dim=2,
        )

    def _attend_row(self, row: RowPieces, query: Tensor, new: tuple[Tensor, Tensor], scale: float | None) -> Tensor:
        partials: list[Partial] = []
        run_count = 0
        for piece in row.pieces:
            key = piece.keys[self.layer]
            run_count += key.shape[0]
            if run_count > FOLD_RUNS:
                partials, run_count = [fold(partials)], key.shape[0] + 1
            partials.append(attend_all(query, key, piece.values[self.layer], scale))
        if row.last - row.first > 1:
            partials.append(attend_causal(query, *new, scale))
        return merge(partials)
