"""Configurations of engines whose model has no weights."""

import functools
import json
import tempfile
from pathlib import Path

from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig

BLOCK_TOKENS = 16
MAX_MODEL_LEN = 256
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}


@functools.cache
def model_config() -> ModelConfig:
    """Returns that of a model without weights. vLLM starts a process to look at its class, which takes seconds."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        return ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=MAX_MODEL_LEN, seed=0)


def vllm_config(*, asynchronous: bool, policy: str = "fcfs", chunk_tokens: int = 0) -> VllmConfig:
    """Returns the configuration of an engine; `chunk_tokens` is the most of one prompt in one step, if it is not 0."""
    config = VllmConfig(
        model_config=model_config(),
        cache_config=CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=6,
            max_num_batched_tokens=64,
            long_prefill_token_threshold=chunk_tokens,
            max_model_len=MAX_MODEL_LEN,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            policy=policy,
        ),
        device_config=DeviceConfig(device="cpu"),
        additional_config={"kvharbor": {}},
    )
    config.scheduler_config.async_scheduling = asynchronous
    return config
