"""The pool layout that a model needs, found by watching it compute one token."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kvharbor.engines.transformers.attention import IN_PLACE, attention_implementation
from kvharbor.engines.transformers.cache import mark
from kvharbor.engines.transformers.errors import AttentionUnsupported, CacheForeign
from kvharbor.engines.transformers.forward import ModelKeywords
from kvharbor.engines.transformers.identity import model_identity
from kvharbor.engines.transformers.kernel import attend_causal, merge
from kvharbor.engines.transformers.step import Step
from kvharbor.gpumem import BlockOrder, DataType, Layout, Plane


def layout_for(model: Any, block_tokens: int = 64, order: BlockOrder = BlockOrder.LAYER_MAJOR) -> Layout:
    """Returns the layout to open a pool with: planes "k" and "v" as the model's layers make them.

    Runs one token through the model and reads all its weights for the identity (about a second for 135 M
    parameters). Raises AttentionUnsupported for a model that cannot run over views.
    """
    keys, values = probe_planes(model, block_tokens)
    return Layout(model_identity(model), block_tokens, (keys, values), order)


def probe_planes(model: Any, block_tokens: int) -> tuple[Plane, Plane]:
    """Returns the planes "k" and "v" that the model's K and V fill, without reading its weights.

    Watching one token through the model is right for every architecture, where a configuration has many
    spellings for the number and width of heads. Raises AttentionUnsupported.
    """
    _refuse_config(model)
    cache = Cache(layer_class_to_replicate=_ProbeLayer)
    keywords = ModelKeywords(model)
    token = torch.zeros((1, 1), dtype=torch.int64)
    step = Step(
        input_ids=token,
        position_ids=torch.zeros_like(token),
        attention_mask=None,
        last_positions=torch.tensor([0]),
        history_tokens=0,
        blocks=token,
        offsets=token,
    )
    with attention_implementation(model, IN_PLACE):
        try:
            keywords.run(model, cache, step)
        except CacheForeign as foreign:
            raise AttentionUnsupported(
                "K and V that change between cache and attention",
                foreign.module,
                "use a model that caches K and V",
            ) from foreign
    layers = [layer for layer in cache.layers if isinstance(layer, _ProbeLayer)]
    if not layers:
        raise AttentionUnsupported("models that do not cache K and V", type(model).__name__, "use one that does")
    for index, layer in enumerate(layers):
        if not layer.attended:
            raise AttentionUnsupported(
                "layers that share or skip K and V", f"layer {index} of {len(layers)}", "use a model without them"
            )
    return _plane("k", [layer.key for layer in layers], block_tokens), _plane(
        "v", [layer.value for layer in layers], block_tokens
    )


def _refuse_config(model: Any) -> None:
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise AttentionUnsupported("encoder-decoder models", type(model).__name__, "use a decoder model")
    if model.device.type != "cpu":
        raise AttentionUnsupported("models off the CPU", model.device, "move the model to the CPU")
    if model.training:
        raise AttentionUnsupported("models in training mode", type(model).__name__, "call model.eval()")
    if changing := rotations_by_length(config):
        raise AttentionUnsupported("rotations that depend on length", changing, "use a model with a fixed one")
    for index, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind != "full_attention":
            raise AttentionUnsupported(
                f"layers of type {kind!r}", f"layer {index}", "use a model of full attention only"
            )


def rotations_by_length(config: Any) -> list[str]:
    """Returns the model's kinds of rotation that turn every key by the longest sequence of a pass.

    K would depend on what runs beside it.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    kinds = {str(each.get("rope_type")) for each in (parameters, *nested)}
    return sorted(kinds & {"dynamic", "longrope"})


def _plane(name: str, states: list[Tensor], block_tokens: int) -> Plane:
    first = states[0]
    for index, state in enumerate(states):
        if state.shape != first.shape or state.dtype != first.dtype:
            raise AttentionUnsupported(
                f"layers that differ in {name.upper()}",
                f"layer 0 {tuple(first.shape)}, layer {index} {tuple(state.shape)}",
                "use a model of equal layers",
            )
    _, head_count, _, head_dim = first.shape
    kind = str(first.dtype).removeprefix("torch.")
    if kind not in {"float32", "float16", "bfloat16"}:
        raise AttentionUnsupported(f"{name.upper()} of this type", kind, "load the model in float32 or 16 bits")
    return Plane.of_tokens(name, len(states), head_count, head_dim, DataType(kind), block_tokens)


class _ProbeLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Notes the K and V of one token, and that attention got them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.key = torch.empty(0)
        self.value = torch.empty(0)
        self.attended = False

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.key, self.value = key_states, value_states
        mark(self, key_states, value_states)
        return key_states, value_states

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        self.attended = True
        return merge([attend_causal(query, key, value, scale)])

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return -1
