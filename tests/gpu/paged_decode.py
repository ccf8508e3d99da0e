"""Attention of one new token a row over K and V in blocks, read where they lie: a Triton kernel for measuring.

It is plain on purpose: what layouts cost shows best in a kernel that does nothing clever about them. The history is
cut into splits, as one row's is too little work for a device; each split gives a partial output and its log-sum-exp.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 64
_LEAST_HEADS = 16  # rows that a matrix unit wants


@dataclass(frozen=True, slots=True)
class Blocks:
    """K and V of all rows: `[block, token, kv head, dim]`, strided at will but for the last axis.

    `table` is `[row, block]`, int32: which blocks a row has, in order. Every row has `token_count` tokens.
    """

    keys: Tensor
    values: Tensor
    table: Tensor
    token_count: int


def attend(query: Tensor, blocks: Blocks, splits: int) -> Tensor:
    """Returns `[row, query head, dim]`, of a query of that shape."""
    row_count, head_count, dims = query.shape
    kv_heads = blocks.keys.shape[2]
    partial = query.new_empty((row_count, head_count, splits, dims), dtype=torch.float32)
    log_sums = query.new_empty((row_count, head_count, splits), dtype=torch.float32)
    _attend_split[(row_count, kv_heads, splits)](
        query,
        blocks.keys,
        blocks.values,
        blocks.table,
        partial,
        log_sums,
        blocks.token_count,
        dims**-0.5,
        *query.stride()[:2],
        *blocks.keys.stride()[:3],
        *blocks.values.stride()[:3],
        blocks.table.stride(0),
        SPLITS=splits,
        BLOCK_TOKENS=blocks.keys.shape[1],
        TILE=_TILE,
        GROUP=head_count // kv_heads,
        HEADS=max(_LEAST_HEADS, triton.next_power_of_2(head_count // kv_heads)),
        DIMS=dims,
    )
    weights = torch.softmax(log_sums, -1).unsqueeze(-1)
    return (partial * weights).sum(2).to(query.dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _attend_split(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    table,
    partial,
    log_sums,
    token_count,
    scale,
    query_row,
    query_head,
    key_block,
    key_token,
    key_head,
    value_block,
    value_token,
    value_head,
    table_row,
    SPLITS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
):
    """One row, one kv head with the group of query heads that share it, one split of the history."""
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    split_tokens = tl.cdiv(tl.cdiv(token_count, TILE), SPLITS) * TILE
    first = split * split_tokens
    last = tl.minimum(first + split_tokens, token_count)
    heads, dims = tl.arange(0, HEADS), tl.arange(0, DIMS)
    own_heads = kv_head * GROUP + heads
    present = heads < GROUP
    queries = tl.load(
        query + row * query_row + own_heads[:, None] * query_head + dims[None, :], mask=present[:, None], other=0.0
    )
    largest = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    output = tl.zeros([HEADS, DIMS], tl.float32)
    for start in range(first, last, TILE):
        tokens = start + tl.arange(0, TILE)
        seen = tokens < last
        # 64 bits: in block-major order a block's place is far beyond 2^31 elements.
        block = tl.load(table + row * table_row + tokens // BLOCK_TOKENS, mask=seen, other=0).to(tl.int64)
        inside = tokens % BLOCK_TOKENS
        key_places = block * key_block + inside * key_token + kv_head * key_head
        key = tl.load(keys + key_places[None, :] + dims[:, None], mask=seen[None, :], other=0.0)
        scores = tl.where(seen[None, :], tl.dot(queries, key) * scale, float("-inf"))
        now_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - now_largest[:, None])
        kept = tl.exp(largest - now_largest)
        value_places = block * value_block + inside * value_token + kv_head * value_head
        value = tl.load(values + value_places[:, None] + dims[None, :], mask=seen[:, None], other=0.0)
        output = output * kept[:, None] + tl.dot(weights.to(value.dtype), value)
        total = total * kept + tl.sum(weights, 1)
        largest = now_largest
    place = ((row * tl.num_programs(1) * GROUP + own_heads) * SPLITS) + split
    # A split behind the end has no tokens, and a weight of 0.
    output = tl.where(total[:, None] > 0, output / total[:, None], 0.0)
    tl.store(partial + place[:, None] * DIMS + dims[None, :], output, mask=present[:, None])
    tl.store(log_sums + place, largest + tl.log(total), mask=present)
