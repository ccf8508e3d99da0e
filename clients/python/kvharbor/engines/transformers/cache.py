"""A transformers cache whose K and V are a pool's blocks."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kvharbor.engines.transformers.pieces import PoolWindow
from kvharbor.engines.transformers.step import Step

_LAYER_ATTRIBUTE = "kvharbor_layer"


def mark(layer: CacheLayerMixin, *states: Tensor) -> None:
    """Notes on K and V which cache layer they went through, for the attention function that gets them next."""
    for tensor in states:
        setattr(tensor, _LAYER_ATTRIBUTE, layer)


def marked_layer(key: Tensor, value: Tensor) -> Any:
    """Returns the cache layer that gave out both K and V, or None if they are not as it gave them."""
    layer = getattr(key, _LAYER_ATTRIBUTE, None)
    return layer if getattr(value, _LAYER_ATTRIBUTE, None) is layer else None


class PoolLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer: writes new K and V into the mapped blocks, each token at its place in its row's table.

    Subclasses say what the model's attention then gets to see.
    """

    def __init__(self, window: PoolWindow, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layer = layer
        self.window = window
        self.step: Any = None

    def write(self, key_states: Tensor, value_states: Tensor) -> None:
        """Stores `[token, kv head, dim]` of the step's new tokens, in the step's order."""
        place = (self.step.blocks, self.step.offsets)
        self.window.keys.layers[self.layer].index_put_(place, key_states)
        self.window.values.layers[self.layer].index_put_(place, value_states)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the memory is the pool's and is there already."""

    def get_seq_length(self) -> int:
        """Returns how many tokens lie before the step's first query."""
        return int(self.step.history_tokens)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns (tokens of K, offset of the first), by which the model builds its mask."""
        return self.step.history_tokens + query_length, 0

    def get_max_length(self) -> int:
        """Returns -1: a sequence may grow as long as its owner extends it."""
        return -1


class PoolCache(Cache):
    """The cache of one model over one pool. It owns no memory and no sequence; `begin` each forward pass."""

    def __init__(self, window: PoolWindow, layer_type: Callable[[PoolWindow, int], PoolLayer]) -> None:
        layer_count = len(window.keys.layers)
        self._pool_layers = [layer_type(window, layer) for layer in range(layer_count)]
        super().__init__(layers=list(self._pool_layers))

    def begin(self, step: Step) -> None:
        """Sets what the next forward pass reads and writes; holds until the next call."""
        for layer in self._pool_layers:
            layer.step = step
