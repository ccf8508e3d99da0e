"""The way to test: gathers K and V into one padded batch, exactly as a DynamicCache would hold it.

It copies the whole history for every token, which is what the packed way exists to avoid. What it gives in
return is bits: the same tensors reach the same functions of transformers as with a DynamicCache and "sdpa",
so a difference of one bit is a fault in reuse, in the tables or in the views.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvharbor.engines.transformers.cache import PoolLayer
from kvharbor.engines.transformers.pieces import PoolWindow
from kvharbor.engines.transformers.step import Row, Step


@dataclass(frozen=True, slots=True)
class PaddedStep(Step):
    """Rows padded on the left, as transformers pads.

    `sources` are the new tokens' (row, column) in the batch; `gathered` is, for each row, the block, offset
    and column of every token of the K and V that attention sees, `width` columns in all.
    """

    sources: tuple[Tensor, Tensor]
    gathered: list[tuple[Tensor, Tensor, Tensor]]
    width: int


def padded_step(window: PoolWindow, rows: Sequence[Row]) -> PaddedStep:
    """Aligns rows at their ends: the last new token of each is in the last column."""
    query_width = max(len(row.token_ids) for row in rows)
    width = max(row.end for row in rows)
    input_ids = torch.zeros((len(rows), query_width), dtype=torch.int64)
    position_ids = torch.ones_like(input_ids)
    mask = torch.zeros((len(rows), width), dtype=torch.int64)
    for index, row in enumerate(rows):
        input_ids[index, -len(row.token_ids) :] = torch.tensor(row.token_ids)
        position_ids[index, -len(row.token_ids) :] = torch.arange(row.start, row.end)
        mask[index, -row.end :] = 1
    new = [_places(window, row, row.start) for row in rows]
    return PaddedStep(
        input_ids=input_ids,
        position_ids=position_ids,
        attention_mask=None if mask.all() else mask,
        last_positions=torch.tensor([query_width - 1]),
        history_tokens=width - query_width,
        blocks=torch.cat([blocks for blocks, _, _ in new]),
        offsets=torch.cat([offsets for _, offsets, _ in new]),
        sources=(
            torch.cat([torch.full_like(columns, index) for index, (_, _, columns) in enumerate(new)]),
            torch.cat([columns + query_width for _, _, columns in new]),
        ),
        gathered=[
            (blocks, offsets, columns + width) for blocks, offsets, columns in (_places(window, row, 0) for row in rows)
        ],
        width=width,
    )


def _places(window: PoolWindow, row: Row, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """Block, offset, and column from the right end (-1 is the last) of positions [start, row.end)."""
    positions = np.arange(start, row.end)
    blocks = row.table[positions // window.block_tokens].astype(np.int64)
    offsets = positions % window.block_tokens
    return torch.from_numpy(blocks), torch.from_numpy(offsets), torch.from_numpy(positions - row.end)


class GatherLayer(PoolLayer):  # type: ignore[no-untyped-call]
    """Writes new K and V in place, then hands attention a contiguous copy of everything."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Returns K and V of all rows, `[row, kv head, width, dim]`, zeros where a row has no token."""
        rows, columns = self.step.sources
        self.write(key_states[rows, :, columns], value_states[rows, :, columns])
        keys = self.window.keys.layers[self.layer]
        values = self.window.values.layers[self.layer]
        return self._gather(keys), self._gather(values)

    def _gather(self, blocks: Tensor) -> Tensor:
        row_count = len(self.step.gathered)
        heads, dims = blocks.shape[2:]
        everything = blocks.new_zeros((row_count, heads, self.step.width, dims))
        for row, (block, offset, column) in enumerate(self.step.gathered):
            everything[row, :, column] = blocks[block, offset].transpose(0, 1)
        return everything
