"""kvharbor's attention functions, under the names that transformers' registry knows them by.

"kvharbor" attends over the mapped blocks where they lie. "kvharbor_gather" is transformers' own "sdpa" on a
gathered copy, for tests. Both compute plain causal attention with a scale, grouped queries included, and
refuse everything else by name: an ignored window or cap would give fluent, wrong answers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from kvharbor.engines.transformers.cache import marked_layer
from kvharbor.engines.transformers.errors import AttentionUnsupported, CacheForeign

IN_PLACE = "kvharbor"
GATHER = "kvharbor_gather"

# Keywords that models hand down to attention and that do not change what it computes. A list of the harmful
# ones would let tomorrow's through.
_HARMLESS = frozenset(
    {
        "cache_position",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


def attend_in_place(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Returns attention's output, `[1, token, query head, dim]`, read through views of the mapped blocks.

    `key` and `value` are what PoolCache.update returned; raises CacheForeign for others. Raises
    AttentionUnsupported.
    """
    _refuse_options(module, options)
    if attention_mask is not None:
        raise AttentionUnsupported("a prepared mask", tuple(attention_mask.shape), "pass none")
    layer = marked_layer(key, value)
    if layer is None:
        raise CacheForeign(type(module).__name__)
    output: Tensor = layer.attend(query, key, value, scaling)
    return output.transpose(1, 2).contiguous(), None


def attend_gathered(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Returns what transformers' "sdpa" does, refusing what `attend_in_place` refuses."""
    _refuse_options(module, options)
    output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling)
    return output, None


def _refuse_options(module: nn.Module, options: dict[str, Any]) -> None:
    kind = type(module).__name__
    if options.pop("is_causal", None) is False or getattr(module, "is_causal", True) is False:
        raise AttentionUnsupported("attention in both directions", kind, "use a decoder model")
    if getattr(module, "sinks", None) is not None:
        raise AttentionUnsupported("attention sinks", kind, "use a model without them")
    for name, value in options.items():
        # None, False and a dropout of 0.0 all say "without it".
        if name not in _HARMLESS and (isinstance(value, Tensor) or value):
            raise AttentionUnsupported(f"{name!r} of {kind}", value, "use a model that attends without it")


def _no_mask(*, mask_function: Any, attention_mask: Tensor | None = None, **_: Any) -> None:
    _refuse_mask(mask_function)
    if attention_mask is not None:
        raise AttentionUnsupported("padding", tuple(attention_mask.shape), "pack rows, and pass no mask")


def _gather_mask(*, mask_function: Any, **options: Any) -> Any:
    _refuse_mask(mask_function)
    return sdpa_mask(mask_function=mask_function, **options)


def _refuse_mask(mask_function: Any) -> None:
    if mask_function is not causal_mask_function:
        raise AttentionUnsupported(
            "a mask other than plain causal",
            getattr(mask_function, "__qualname__", mask_function),
            "use a model without sliding windows, chunks or prefixes in its mask",
        )


AttentionInterface.register(IN_PLACE, attend_in_place)
AttentionInterface.register(GATHER, attend_gathered)
AttentionMaskInterface.register(IN_PLACE, _no_mask)
AttentionMaskInterface.register(GATHER, _gather_mask)


@contextmanager
def attention_implementation(model: Any, name: str) -> Iterator[None]:
    """Lets the model attend by the function `name` inside the block, then gives it back its own.

    The setting is the model's: do not run it elsewhere meanwhile.
    """
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        if model.config._attn_implementation != name:
            raise AttentionUnsupported(
                "models with attention of their own", type(model).__name__, "use one on transformers' registry"
            )
        with torch.inference_mode():
            yield
    finally:
        model.set_attn_implementation(before)
