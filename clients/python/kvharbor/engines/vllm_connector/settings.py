"""The arguments for vLLM, and what they say when they come back from it."""

from typing import Any

from kvharbor.engines.vllm.settings import DEFAULT_BLOCK_TOKENS, DEFAULT_POOL, KEY, Settings

MODULE = "kvharbor.engines.vllm_connector"
CONNECTOR = "HarborConnector"


def connector_args(
    endpoint: str = "",
    pool: str = DEFAULT_POOL,
    *,
    size: str | int = 0,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    model: str = "",
    kv_role: str = "kv_both",
    instance: str = "",
) -> dict[str, Any]:
    """Returns the keyword arguments that let a vLLM engine use a pool: `LLM(model, **connector_args(...))`.

    They go with those of your own, as long as none is named twice. `size` is that of the pool, in bytes or text such as
    "8GiB", and needed by the first engine only. `block_tokens` is vLLM's block_size: a multiple of 32 on a CPU. `model`
    names the weights; without it the files of the checkpoint are hashed at start, which have to be in a local folder.
    `kv_role` "kv_consumer" only takes from the pool, "kv_producer" only gives to it. `instance` is what
    `kvharbor stats` calls this engine.
    """
    return {
        "block_size": block_tokens,
        "enable_prefix_caching": True,
        "prefix_caching_hash_algo": "sha256",
        "kv_transfer_config": {
            "kv_connector": CONNECTOR,
            "kv_connector_module_path": MODULE,
            "kv_role": kv_role,
            # What cannot be loaded is computed; vLLM's default is to fail the request.
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": Settings(endpoint, pool, size, model, instance=instance).checked().given(),
        },
    }


def settings_of(vllm_config: Any) -> Settings:
    """Returns what the engine was started with, or raises SettingInvalid."""
    return Settings.of({KEY: vllm_config.kv_transfer_config.kv_connector_extra_config})
