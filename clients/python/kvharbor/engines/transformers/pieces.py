"""The history of a sequence as views of the mapped blocks: few, long, and cut once a step for all layers."""

from dataclasses import dataclass

from torch import Tensor

from kvharbor.engines.transformers.step import BlockTable
from kvharbor.gpumem import BlockViews, Run, block_runs

_STRIDED_BLOCKS = 8
"""Blocks that do not touch share a kernel call in groups of so many, which bounds its output."""


@dataclass(frozen=True, slots=True)
class Piece:
    """K and V of some neighbouring tokens: one view a layer, `[run, kv head, token, dim]`, of mapped memory."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


class PlaneWindow:
    """Shows all layers of one plane as one tensor, `[layer, block, token, head, dim]`, without a copy."""

    def __init__(self, views: BlockViews, plane: str) -> None:
        span = views.descriptor.span(plane)
        first = views.torch(plane, 0)
        layer_stride = span.layer_stride_bytes // span.plane.data_type.itemsize
        self.blocks = first.as_strided(
            (span.plane.layer_count, *first.shape), (layer_stride, *first.stride()), first.storage_offset()
        )
        self.layers = self.blocks.unbind(0)
        blocks_touch = span.block_stride_bytes == span.plane.page_bytes
        self._tokens = self.blocks.flatten(1, 2) if blocks_touch else None

    def cut(self, run: Run, token_count: int) -> list[tuple[Tensor, ...]]:
        """Cuts the first `token_count` tokens of a run into pieces, each one view a layer.

        One piece where neighbouring blocks touch (layer-major); elsewhere groups of whole blocks, and the
        part of a block at the end.
        """
        block_tokens = self.blocks.shape[2]
        if self._tokens is not None:
            first = run.first_block * block_tokens
            return [_heads_first(self._tokens[:, None, first : first + token_count])]
        whole, rest = divmod(token_count, block_tokens)
        groups = [(done, min(_STRIDED_BLOCKS, whole - done), block_tokens) for done in range(0, whole, _STRIDED_BLOCKS)]
        groups += [(whole, 1, rest)] if rest else []
        return [
            _heads_first(self.blocks[:, run.first_block + start : run.first_block + start + count, :tokens])
            for start, count, tokens in groups
        ]


class PoolWindow:
    """The planes "k" and "v" of a pool, all layers of each at once. Holds views: drop it before the mapping."""

    def __init__(self, views: BlockViews) -> None:
        self.block_tokens = views.descriptor.layout.block_tokens
        self.keys = PlaneWindow(views, "k")
        self.values = PlaneWindow(views, "v")

    def pieces(self, table: BlockTable, token_count: int) -> list[Piece]:
        """Returns the first `token_count` tokens of a block table in order, as few pieces as its runs allow."""
        pieces: list[Piece] = []
        for run in block_runs(table[: -(-token_count // self.block_tokens)]):
            run_tokens = min(run.block_count * self.block_tokens, token_count)
            token_count -= run_tokens
            pieces += map(Piece, self.keys.cut(run, run_tokens), self.values.cut(run, run_tokens))
        return pieces


def _heads_first(tokens: Tensor) -> tuple[Tensor, ...]:
    """`[layer, run, token, head, dim]` as one `[run, head, token, dim]` a layer."""
    return tokens.transpose(2, 3).unbind(0)
