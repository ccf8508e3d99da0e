"""Small random decoder models of transformers, one of each kind of attention that matters here."""

from typing import Any

import torch
import transformers

SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GPT2_SHAPE = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512}

# What each adds to the plain case: a bias on Q and K, norms on them and a head wider than hidden / heads, a single
# K/V head, no grouping and partly rotated positions, a scale of its own, learned positions and one fused matrix.
DECODERS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 24},
    "Mistral": {"sliding_window": None},
    "Gemma": {"head_dim": 32, "num_key_value_heads": 1, "pad_token_id": 0},
    "GPTNeoX": {},
    "Granite": {"attention_multiplier": 0.3},
    "GPT2": GPT2_SHAPE,
}


def decoder(kind: str, **settings: Any) -> Any:
    """Builds a random model in evaluation mode, the same one each time."""
    own = DECODERS.get(kind, {})
    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **own, **settings})
    name = f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    with torch.random.fork_rng():
        torch.manual_seed(20)
        model = getattr(transformers, name)(config)
        for parameter in model.parameters():
            # As initialised, such models say the same token for ever; so much noise makes each token matter.
            if parameter.dim() > 1:
                parameter.data.normal_(0.0, 0.15)
    return model.eval()
