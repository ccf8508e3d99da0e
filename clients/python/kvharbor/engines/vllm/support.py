"""What an engine may not be configured for, checked by its worker and by its scheduler before anything is touched."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from kvharbor.engines.vllm.errors import FeatureUnsupported, PluginIncomplete
from kvharbor.engines.vllm.settings import Settings
from kvharbor.engines.vllm.versions import require_tested, vllm_version


class _Found(NamedTuple):
    feature: str
    value: object
    remedy: str


def require_supported(vllm_config: Any) -> Settings:
    """Returns the engine's settings, or raises what is wrong with its configuration."""
    settings = Settings.of(vllm_config.additional_config)
    require_tested(vllm_version(), allow_untested=settings.allow_untested_version)
    for found in _unsupported(vllm_config):
        raise FeatureUnsupported(*found)
    return settings


def require_fit(vllm_config: Any, block_count: int, block_tokens: int) -> None:
    """Raises FeatureUnsupported unless the longest request fits beside the block that is never given out."""
    usable, longest = (block_count - 1) * block_tokens, vllm_config.model_config.max_model_len
    if usable < longest:
        raise FeatureUnsupported(
            "requests larger than the pool",
            f"max_model_len={longest}, and the pool has {usable} tokens",
            "make the pool larger, or max_model_len smaller",
        )


def require_scheduler(vllm_config: Any, scheduler: type) -> None:
    """Raises PluginIncomplete unless the engine's scheduler will be a subclass of `scheduler`."""
    found = vllm_config.scheduler_config.scheduler_cls
    if found is None or not issubclass(vllm_config.scheduler_config.get_scheduler_cls(), scheduler):
        raise PluginIncomplete("the scheduler", found or "vLLM's own")


def require_worker(vllm_config: Any, worker: type) -> None:
    """Raises PluginIncomplete unless the engine's workers are of a subclass of `worker`."""
    from vllm.utils.import_utils import resolve_obj_by_qualname

    found = vllm_config.parallel_config.worker_cls
    resolved = resolve_obj_by_qualname(found) if isinstance(found, str) else found
    if not issubclass(resolved, worker):
        raise PluginIncomplete("the worker", found)


def _unsupported(vllm_config: Any) -> Iterator[_Found]:
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    if not cache.enable_prefix_caching:
        yield _Found(
            "engines without prefix caching", "enable_prefix_caching=False", "turn it on, or leave kvharbor out"
        )
    if not str(cache.prefix_caching_hash_algo).startswith("sha256"):
        # Its seed is another in every process, so no two engines would ever agree on a block.
        yield _Found(
            "hashes that only one process knows",
            f"prefix_caching_hash_algo={cache.prefix_caching_hash_algo}",
            "use sha256 or sha256_cbor",
        )
    if cache.num_gpu_blocks_override is not None:
        yield _Found(
            "a number of blocks of the engine's own",
            f"num_gpu_blocks_override={cache.num_gpu_blocks_override}",
            "leave it out: an engine has all blocks of the pool",
        )
    if vllm_config.speculative_config is not None:
        yield _Found("speculative decoding", "speculative_config", "leave it out")
    if vllm_config.kv_transfer_config is not None:
        yield _Found("KV connectors", "kv_transfer_config", "leave it out")
    events = vllm_config.kv_events_config
    if events is not None and events.enable_kv_cache_events:
        yield _Found("vLLM's KV cache events", "kv_events_config", "watch the pool instead: kvharbor watch")
    if vllm_config.model_config.enable_sleep_mode or vllm_config.model_config.enable_cumem_allocator:
        yield _Found("sleep mode", "enable_sleep_mode", "leave it out: the pool's memory is not the engine's to free")
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(parallel, name)) > 1:
            yield _Found(
                name.removesuffix("_size").replace("_", " ") + "ism", f"{name}={size}", "use tensor parallelism"
            )
    if vllm_config.model_config.runner_type != "generate":
        yield _Found("models that do not generate", vllm_config.model_config.runner_type, "leave kvharbor out")
