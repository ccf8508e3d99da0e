"""One forward pass over several sequences: what goes in, and where its K and V belong."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

BlockTable = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Row:
    """New tokens of one sequence: `token_ids` at positions [start, start + len(token_ids)) of its table.

    K and V of positions [0, start) are in the pool. Those of the new tokens will be written there: their
    blocks must be this caller's to write.
    """

    table: BlockTable
    start: int
    token_ids: Sequence[int]

    @property
    def end(self) -> int:
        """The position after the last new token."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Step:
    """The model's inputs, and the block and offset of each new token's K and V, in the order of the rows.

    `last_positions` are the columns of the output that belong to the rows' last tokens. `history_tokens` is
    what the model takes for the length of its cache when it builds its mask.
    """

    input_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor | None
    last_positions: Tensor
    history_tokens: int
    blocks: Tensor
    offsets: Tensor
