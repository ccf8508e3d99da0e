"""A worker that generates with a small Llama of random weights, on K and V in a pool or without any cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvharbor.client import connect
from kvharbor.engines.transformers import PoolModel, Row, layout_for
from kvharbor.engines.transformers.forward import ModelKeywords
from tiny_models import decoder

BLOCK_TOKENS = 16
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}


@dataclass(frozen=True, slots=True)
class Generated:
    """What came of a prompt: how much of it was in the pool, the tokens, and the logits that each was chosen by."""

    cached_tokens: int
    tokens: list[int]
    logits: Any
    """`[token, vocabulary]`, a float32 array."""


class GeneratingWorker:
    """A model on a device and its pool. Every worker makes the same weights, and so names the same layout."""

    def __init__(self, target: str, pool_name: str, block_count: int, *, device: str, data_type: str) -> None:
        self._device = torch.device(device)
        model = decoder("Llama", **SHAPE).to(getattr(torch, data_type))
        layout = layout_for(model, BLOCK_TOKENS)  # which looks at a model on the CPU
        self._model = model.to(self._device)
        self.harbor = connect(target)
        self._pool = self.harbor.open_pool(pool_name, layout, block_count * layout.block_bytes)
        self._on_pool = PoolModel.gathering(self._model, self._pool.views)

    def on_pool(self, prompt: Sequence[int], token_count: int) -> Generated:
        """Generates greedily on the pool: reads what is there, writes the rest, commits whole blocks."""
        with self._pool.allocate(prompt, max_cached_tokens=len(prompt) - 1, reserve_tokens=token_count) as sequence:
            start, fed = sequence.cached_tokens, list(prompt[sequence.cached_tokens :])
            taken: list[Tensor] = []
            # What the engine makes without a device is made on the model's.
            with self._on_pool.attending(), self._device:
                for _ in range(token_count):
                    taken.append(self._on_pool.logits([Row(sequence.table, start, fed)])[0])
                    start, fed = start + len(fed), [int(taken[-1].argmax())]
            sequence.commit(len(prompt))
            return _generated(sequence.cached_tokens, taken)

    def without_cache(self, prompt: Sequence[int], tokens: Sequence[int]) -> Any:
        """Returns the logits by which each of `tokens` is chosen, each from all tokens before it at once."""
        known = [*prompt, *tokens]
        with torch.inference_mode():
            taken = [self._run(known[:end], use_cache=False) for end in range(len(prompt), len(known))]
        return _array(taken)

    def with_own_cache(self, prompt: Sequence[int], cached_tokens: int, tokens: Sequence[int]) -> Any:
        """As `on_pool` would have it, in the same passes, with K and V in a cache of transformers' own."""
        cache = DynamicCache(config=self._model.config)
        options = {ModelKeywords(self._model).cache: cache, "use_cache": True}
        with torch.inference_mode():
            taken = [self._run(prompt, **options)]
            if cached_tokens:
                cache.crop(cached_tokens - len(prompt))
                taken = [self._run(prompt[cached_tokens:], **options)]
            taken += [self._run([token], **options) for token in tokens[:-1]]
        return _array(taken)

    def close(self) -> None:
        """Ends the session, once no tensor is left over memory that it says to have let go."""
        del self._on_pool
        self.harbor.close()

    def _run(self, tokens: Sequence[int], **options: Any) -> Tensor:
        output: Tensor = self._model(
            torch.tensor([list(tokens)], device=self._device), logits_to_keep=1, **options
        ).logits
        return output[0, -1].float()


def _generated(cached_tokens: int, taken: list[Tensor]) -> Generated:
    return Generated(cached_tokens, [int(logits.argmax()) for logits in taken], _array(taken))


def _array(taken: list[Tensor]) -> Any:
    return torch.stack(taken).cpu().numpy()
