"""What an engine with the connector may not be configured for, checked before anything is opened."""

from typing import Any

from kvharbor.engines.vllm.errors import FeatureUnsupported


def require_supported(vllm_config: Any) -> None:
    """Raises FeatureUnsupported; what its layers are like is checked with the layout."""
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    if not str(cache.prefix_caching_hash_algo).startswith("sha256"):
        raise FeatureUnsupported(
            "hashes that only one process knows",
            f"prefix_caching_hash_algo={cache.prefix_caching_hash_algo}",
            "use sha256 or sha256_cbor",
        )
    if vllm_config.speculative_config is not None:
        raise FeatureUnsupported("speculative decoding", "speculative_config", "leave it out")
    for name in (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        if (size := getattr(parallel, name)) > 1:
            raise FeatureUnsupported(f"several ranks by {name}", size, "run one rank an engine")
