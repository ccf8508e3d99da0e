"""Pages of SGLang's device pool and of kvharbor's, and copies between them, a layer at a time."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvharbor.client import Pool
from kvharbor.engines.sglang_linker.errors import LinkerUnsupported
from kvharbor.gpumem import BlockOrder, DataType, Layout

Copy = tuple[int, int]
"""A block of the pool, and the first slot of a page of SGLang's."""


def layout_of(kv_cache: Any, model: str, page_size: int) -> Layout:
    """Returns the pool's layout for a device pool of plain attention: planes "k" and "v", `[token, head, dim]`.

    Raises LinkerUnsupported for any other.
    """
    keys, values = getattr(kv_cache, "k_buffer", None), getattr(kv_cache, "v_buffer", None)
    if not keys or not values or {buffer.dim() for buffer in (*keys, *values)} != {3}:
        raise LinkerUnsupported("this kind of KV cache", type(kv_cache).__name__, "use a model of plain attention")
    shapes = {(tuple(buffer.shape[1:]), buffer.dtype, buffer.is_contiguous()) for buffer in (*keys, *values)}
    (heads, dim), dtype, contiguous = next(iter(shapes))
    kind = str(dtype).removeprefix("torch.")
    if len(shapes) > 1 or not contiguous or kind not in {each.value for each in DataType}:
        raise LinkerUnsupported("layers that differ, or pages in pieces", shapes, "use a model of equal layers")
    return Layout.attention(
        model, len(keys), heads, dim, DataType(kind), page_size, order=BlockOrder.BLOCK_MAJOR, scratch_blocks=1
    )


class Pages:
    """Copies pages. It keeps the pool's mapping open."""

    def __init__(self, pool: Pool, kv_cache: Any) -> None:
        self._page_size = pool.block_tokens
        self.layer_count = pool.descriptor.span("k").plane.layer_count
        self._sides: list[list[tuple[Tensor, Tensor]]] = [
            [
                (pool.views.torch("k", layer), kv_cache.k_buffer[layer]),
                (pool.views.torch("v", layer), kv_cache.v_buffer[layer]),
            ]
            for layer in range(self.layer_count)
        ]

    def starts(self, slots: Tensor) -> list[int]:
        """Returns the first slot of each page; raises LinkerUnsupported where a page is not in one piece."""
        pages = slots.detach().to("cpu", torch.int64).reshape(-1, self._page_size)
        first = pages[:, 0]
        if not torch.equal(pages, first[:, None] + torch.arange(self._page_size)):
            raise LinkerUnsupported("pages that are not contiguous", slots.tolist(), "use a page size above 1")
        starts: list[int] = first.tolist()
        return starts

    def load(self, layer: int, copies: Sequence[Copy]) -> None:
        """Copies one layer of blocks into SGLang's pages."""
        for theirs, own in self._sides[layer]:
            for block, start in copies:
                own[start : start + self._page_size].copy_(theirs[block])

    def store(self, copies: Sequence[Copy]) -> None:
        """Copies SGLang's pages into blocks; they are there when it returns."""
        for layer in self._sides:
            for theirs, own in layer:
                for block, start in copies:
                    theirs[block].copy_(own[start : start + self._page_size])
        if self._sides[0][0][1].is_cuda:
            torch.cuda.current_stream().synchronize()
