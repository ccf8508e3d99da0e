"""Blocks as pages of bytes, in vLLM's cache and in the pool, and copies between them."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from kvharbor.client import Pool
from kvharbor.engines.vllm.errors import ContractBroken
from kvharbor.engines.vllm.layout import PLANE
from kvharbor.engines.vllm_connector.messages import Copy


class Pages:
    """The pages of both sides by layer, uint8 `[block, byte]`. It keeps the pool's mapping open."""

    def __init__(self, pool: Pool, caches: Mapping[str, Tensor], layer_names: Sequence[str]) -> None:
        span = pool.descriptor.span(PLANE)
        page_bytes, block_count = span.plane.page_bytes, pool.descriptor.block_count
        memory = pool.views.torch_bytes()
        self._pool = [
            memory.as_strided(
                (block_count, page_bytes),
                (span.block_stride_bytes, 1),
                span.offset_bytes + layer * span.layer_stride_bytes,
            )
            for layer in range(span.plane.layer_count)
        ]
        self._own = [_own_pages(name, caches[name], page_bytes) for name in layer_names]
        if len(self._own) != len(self._pool):
            raise ContractBroken(f"vLLM has {len(self._own)} layers with a KV cache, the pool {len(self._pool)}")

    def load(self, copies: Sequence[Copy]) -> None:
        """Copies blocks of the pool into blocks of vLLM's cache."""
        for layer in range(len(self._own)):
            _copy(self._pool[layer], self._own[layer], copies)

    def store(self, copies: Sequence[Copy]) -> None:
        """Copies blocks of vLLM's cache into blocks of the pool; they are there when it returns."""
        for layer in range(len(self._own)):
            _copy(self._own[layer], self._pool[layer], copies)
        if self._own[0].is_cuda or self._pool[0].is_cuda:
            torch.cuda.current_stream().synchronize()


def runs(copies: Iterable[Copy]) -> list[tuple[int, int, int]]:
    """Joins copies of neighbours to neighbours: (first from, first to, how many)."""
    joined: list[tuple[int, int, int]] = []
    for source, target in copies:
        if joined and (source, target) == (joined[-1][0] + joined[-1][2], joined[-1][1] + joined[-1][2]):
            joined[-1] = (*joined[-1][:2], joined[-1][2] + 1)
        else:
            joined.append((source, target, 1))
    return joined


def _copy(source: Tensor, target: Tensor, copies: Sequence[Copy]) -> None:
    for first, to, count in runs(copies):
        target[to : to + count].copy_(source[first : first + count])


def _own_pages(name: str, cache: Tensor, page_bytes: int) -> Tensor:
    """Returns the pages of a layer: block after block, each in one piece whatever its inside looks like."""
    item_bytes = cache.element_size()
    block_bytes = cache[0].numel() * item_bytes
    inner = sorted(pair for pair in zip(cache.stride()[1:], cache.shape[1:], strict=True) if pair[1] > 1)
    dense = all(stride == _product(size for _, size in inner[:place]) for place, (stride, _) in enumerate(inner))
    if block_bytes != page_bytes or not dense:
        raise ContractBroken(
            f"vLLM's KV cache of {name} is {tuple(cache.shape)} by {cache.stride()}, which is not one page of"
            f" {page_bytes} bytes a block"
        )
    flat = torch.empty(0, dtype=torch.uint8, device=cache.device)
    flat.set_(
        cache.untyped_storage(),
        cache.storage_offset() * item_bytes,
        (cache.shape[0], page_bytes),
        (cache.stride(0) * item_bytes, 1),
    )
    return flat


def _product(sizes: Iterable[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
