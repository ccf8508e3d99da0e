"""Which models run over views, what pool they need, and by what name two of them are told apart."""

from typing import Any

import pytest
import torch
import transformers

from kvharbor.engines.transformers import AttentionUnsupported, CacheForeign, layout_for, model_identity
from kvharbor.engines.transformers.attention import attend_in_place
from kvharbor.engines.transformers.cache import mark
from kvharbor.gpumem import BlockOrder, DataType
from tiny_models import DECODERS, decoder

# (K/V heads, head size) as each configuration spells it.
HEADS = {
    "Llama": (2, 16),
    "Qwen2": (2, 16),
    "Qwen3": (2, 24),
    "Mistral": (2, 16),
    "Gemma": (1, 32),
    "GPTNeoX": (4, 16),
    "Granite": (2, 16),
    "GPT2": (4, 16),
}


@pytest.mark.parametrize("kind", DECODERS)
def test_the_layout_is_what_the_layers_make(kind: str) -> None:
    """Planes k and v with the model's layers, heads, head size and type, whatever its configuration calls them."""
    layout = layout_for(decoder(kind), 32, BlockOrder.BLOCK_MAJOR)
    assert (layout.block_tokens, layout.order) == (32, BlockOrder.BLOCK_MAJOR)
    shapes = [(plane.name, plane.layer_count, plane.head_count, plane.head_dim) for plane in layout.planes]
    assert [("k", 3, *HEADS[kind]), ("v", 3, *HEADS[kind])] == shapes


def test_the_layout_follows_the_type_of_the_weights() -> None:
    """A bfloat16 model has bfloat16 planes, and shares with no float32 one."""
    half, full = layout_for(decoder("Llama").to(torch.bfloat16)), layout_for(decoder("Llama"))
    assert {DataType.BFLOAT16} == {plane.data_type for plane in half.planes}
    assert half.model != full.model


def test_the_layout_leaves_the_model_as_it_was() -> None:
    """Watching a token changes neither the model's attention nor its weights."""
    model = decoder("Llama")
    before = model_identity(model), model.config._attn_implementation
    layout_for(model)
    assert before == (model_identity(model), model.config._attn_implementation)


def test_equal_weights_have_one_identity() -> None:
    """Two processes that load the same model meet in one pool, whatever folder it came from."""
    first, second = decoder("Llama"), decoder("Llama")
    second.config._name_or_path = "elsewhere"
    assert model_identity(first) == model_identity(second)


def test_one_changed_weight_changes_the_identity() -> None:
    """[E4] a fine-tuned model never meets its base model's blocks."""
    first, second = decoder("Llama"), decoder("Llama")
    second.model.layers[2].mlp.down_proj.weight.data[0, 0] += 1e-3
    assert model_identity(first) != model_identity(second)


def test_a_setting_that_changes_keys_changes_the_identity() -> None:
    """[E4] equal weights under another rotation make other K."""
    first = decoder("Llama")
    second = decoder("Llama", rope_parameters={"rope_type": "default", "rope_theta": 500_000.0})
    assert model_identity(first) != model_identity(second)


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "sliding windows": ("Mistral", {"sliding_window": 32}),
    "alternating windows and a cap on scores": ("Gemma2", {"head_dim": 16, "pad_token_id": 0}),
    "attention sinks": ("GptOss", {"head_dim": 16, "num_local_experts": 2, "layer_types": ["full_attention"] * 3}),
    "a latent in place of K and V": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 3,
        },
    ),
    "attention of its own": ("Falcon", {"alibi": False}),
    "rotations that depend on the longest sequence": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}},
    ),
    "recurrent layers": (
        "Qwen3Next",
        {
            "head_dim": 16,
            "num_experts": 0,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
}


@pytest.mark.parametrize("feature", REFUSED)
def test_a_model_that_views_would_get_wrong_is_refused(feature: str) -> None:
    """[E3] what this engine does not compute it refuses by name, at once, and not with fluent nonsense."""
    kind, own = REFUSED[feature]
    with pytest.raises(AttentionUnsupported) as refusal:
        layout_for(decoder(kind, **own))
    assert refusal.value.reason == "ATTENTION_UNSUPPORTED"
    assert refusal.value.feature
    assert refusal.value.remedy


def test_an_encoder_decoder_is_refused() -> None:
    """Its cross-attention has no place in a pool of prefixes."""
    config = transformers.T5Config(d_model=32, d_ff=32, num_layers=1, num_heads=2, vocab_size=64)
    with pytest.raises(AttentionUnsupported, match="encoder-decoder"):
        layout_for(transformers.T5ForConditionalGeneration(config))


def test_a_type_that_no_pool_holds_is_refused() -> None:
    """There are no planes of float64."""
    with pytest.raises(AttentionUnsupported, match="float64"):
        layout_for(decoder("Llama").double())


def test_a_model_in_training_is_refused() -> None:
    """Dropout would make two workers disagree on the same prefix."""
    with pytest.raises(AttentionUnsupported, match="eval"):
        layout_for(decoder("Llama").train())


def test_a_models_attention_is_given_back_after_a_refusal() -> None:
    """A refused model still works on its own."""
    model = decoder("Mistral", sliding_window=32)
    with pytest.raises(AttentionUnsupported):
        layout_for(model)
    assert model.config._attn_implementation == "sdpa"
    model(torch.zeros((1, 4), dtype=torch.int64))


def test_kvharbors_attention_without_its_cache_says_so() -> None:
    """Set by hand and called with transformers' own cache, it names the mistake."""
    model = decoder("Llama")
    model.set_attn_implementation("kvharbor")
    with pytest.raises(CacheForeign, match="LlamaAttention"):
        model(torch.zeros((1, 4), dtype=torch.int64))


def test_a_padding_mask_is_refused() -> None:
    """Rows are packed, so a mask with holes means a caller that pads: its rows would see the padding."""
    model = decoder("Llama")
    model.set_attn_implementation("kvharbor")
    with pytest.raises(AttentionUnsupported, match="padding"):
        model(torch.zeros((1, 4), dtype=torch.int64), attention_mask=torch.tensor([[0, 1, 1, 1]]))


@pytest.mark.parametrize(
    "option",
    [
        {"softcap": 50.0},
        {"sliding_window": 32},
        {"s_aux": torch.zeros(4)},
        {"position_bias": torch.zeros(1)},
        {"dropout": 0.1},
        {"output_attentions": True},
        {"is_causal": False},
        {"an_option_of_tomorrow": 1},
    ],
    ids=lambda option: next(iter(option)),
)
def test_an_option_that_changes_attention_is_refused_by_name(option: dict[str, Any]) -> None:
    """[E3] whatever a model hands down that is not known to be harmless could change the answer."""
    states = torch.zeros(1, 1, 1, 8)
    with pytest.raises(AttentionUnsupported, match=r"both directions|" + next(iter(option))):
        attend_in_place(torch.nn.Module(), states, states, states, None, **option)


@pytest.mark.parametrize("option", ["softcap", "sliding_window", "s_aux", "use_cache", "position_ids"])
def test_an_option_that_is_not_used_is_no_reason_to_refuse(option: str) -> None:
    """Models hand down what they do not use as None; attention then goes on to look for its cache."""
    states = torch.zeros(1, 1, 1, 8)
    with pytest.raises(CacheForeign):
        attend_in_place(torch.nn.Module(), states, states, states, None, dropout=0.0, **{option: None})


def test_sinks_that_a_module_adds_by_itself_are_refused() -> None:
    """Some models' own attention functions read the sinks off the module."""
    module = torch.nn.Module()
    module.sinks = torch.nn.Parameter(torch.zeros(4))
    states = torch.zeros(1, 1, 1, 8)
    with pytest.raises(AttentionUnsupported, match="sinks"):
        attend_in_place(module, states, states, states, None)


def test_v_that_changes_after_it_was_cached_is_noticed() -> None:
    """K as cached and V not: what lies in the blocks would not be what attention saw."""
    key, value = torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1, 8)
    mark(object(), key, value)  # type: ignore[arg-type]
    with pytest.raises(CacheForeign):
        attend_in_place(torch.nn.Module(), key, key, value * 2, None)
