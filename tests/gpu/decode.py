"""Attention of one new token a row by torch alone: over contiguous K and V, and over a gathered copy of blocks."""

import torch
from torch import Tensor


def attend_contiguous(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Returns `[row, query head, dim]` of a query of that shape; K and V are `[row, kv head, token, dim]`."""
    output: Tensor = torch.nn.functional.scaled_dot_product_attention(query.unsqueeze(2), keys, values, enable_gqa=True)
    return output.squeeze(2)


def attend_gathered(query: Tensor, keys: Tensor, values: Tensor, table: Tensor) -> Tensor:
    """The same over blocks, `[block, token, kv head, dim]`, of which `table`, `[row, block]`, names each row's."""
    return attend_contiguous(query, gathered(keys, table), gathered(values, table))


def gathered(blocks: Tensor, table: Tensor) -> Tensor:
    """Returns a copy, `[row, kv head, token, dim]`."""
    rows = blocks.index_select(0, table.flatten()).reshape(len(table), -1, *blocks.shape[2:])
    return rows.transpose(1, 2).contiguous()
