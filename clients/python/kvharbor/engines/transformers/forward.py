"""A model made to compute on a pool's memory: one call is one forward pass over any rows."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from kvharbor.engines.transformers.attention import GATHER, IN_PLACE, attention_implementation
from kvharbor.engines.transformers.cache import PoolCache, PoolLayer
from kvharbor.engines.transformers.errors import AttentionUnsupported
from kvharbor.engines.transformers.packed import ViewLayer, packed_step
from kvharbor.engines.transformers.padded import GatherLayer, padded_step
from kvharbor.engines.transformers.pieces import PoolWindow
from kvharbor.engines.transformers.step import Row, Step
from kvharbor.gpumem import BlockViews


class PoolModel:
    """Runs a decoder model of transformers over the blocks of a pool; build it with one of the two makers.

    It holds views of the pool: drop it before the mapping closes. One forward pass at a time.
    """

    def __init__(
        self,
        model: Any,
        window: PoolWindow,
        *,
        implementation: str,
        layer_type: Callable[[PoolWindow, int], PoolLayer],
        lay_out: Callable[[PoolWindow, Sequence[Row]], Step],
    ) -> None:
        self._model = model
        self._window = window
        self._implementation = implementation
        self._cache = PoolCache(window, layer_type)
        self._lay_out = lay_out
        self._keywords = ModelKeywords(model)

    @classmethod
    def in_place(cls, model: Any, views: BlockViews) -> "PoolModel":
        """Attends over the mapped blocks where they lie; rows of any lengths cost no padding."""
        window = PoolWindow(views)
        return cls(model, window, implementation=IN_PLACE, layer_type=ViewLayer, lay_out=packed_step)

    @classmethod
    def gathering(cls, model: Any, views: BlockViews) -> "PoolModel":
        """Copies the history for every pass and is bit for bit a DynamicCache under "sdpa". For tests."""
        window = PoolWindow(views)
        return cls(model, window, implementation=GATHER, layer_type=GatherLayer, lay_out=padded_step)

    def attending(self) -> AbstractContextManager[None]:
        """Gives the model kvharbor's attention for the block, inside of which `logits` works."""
        return attention_implementation(self._model, self._implementation)

    def logits(self, rows: Sequence[Row]) -> Tensor:
        """Writes the K and V of the rows' new tokens and returns the logits after each row's last token.

        `[row, vocabulary]`, float32, the caller's own.
        """
        step = self._lay_out(self._window, rows)
        self._cache.begin(step)
        return self._keywords.run(self._model, self._cache, step).flatten(0, 1).float()


class ModelKeywords:
    """What a model's forward calls its arguments, which differs between models and releases."""

    def __init__(self, model: Any) -> None:
        names = inspect.signature(model.forward).parameters
        if "position_ids" not in names:
            raise AttentionUnsupported(
                "models that derive positions from a mask", type(model).__name__, "use one that takes position_ids"
            )
        self.cache = "cache" if "cache" in names else "past_key_values"
        self.keeps_logits = "logits_to_keep" in names

    def run(self, model: Any, cache: Cache, step: Step) -> Tensor:
        """Returns the logits at the step's last positions, `[batch, position, vocabulary]`."""
        options: dict[str, Any] = {self.cache: cache, "use_cache": True}
        if self.keeps_logits:
            options["logits_to_keep"] = step.last_positions
        output: Tensor = model(
            input_ids=step.input_ids,
            position_ids=step.position_ids,
            attention_mask=step.attention_mask,
            **options,
        ).logits
        return output if self.keeps_logits else output[:, step.last_positions]
