"""Engines that are configured for what a shared pool does not do: refused at the start, by name."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from engines.fake_owner import FakeOwner
from engines.scheduler_configs import BLOCK_TOKENS, vllm_config
from engines.scheduler_world import Engine, World
from kvharbor.engines.vllm import FeatureUnsupported, SettingInvalid, VersionUnsupported
from kvharbor.engines.vllm.layout import only_spec
from kvharbor.engines.vllm.support import require_supported
from kvharbor.engines.vllm.versions import require_tested

pytestmark = pytest.mark.timeout(300)

UNSUPPORTED: dict[str, tuple[str, object]] = {
    "prefix caching": ("cache_config.enable_prefix_caching", False),
    "only one process": ("cache_config.prefix_caching_hash_algo", "xxhash"),
    "number of blocks": ("cache_config.num_gpu_blocks_override", 100),
    "speculative decoding": ("speculative_config", SimpleNamespace()),
    "KV connectors": ("kv_transfer_config", SimpleNamespace()),
    "events": ("kv_events_config", SimpleNamespace(enable_kv_cache_events=True)),
    "sleep mode": ("model_config.enable_sleep_mode", True),
    "pipeline parallel": ("parallel_config.pipeline_parallel_size", 2),
    "decode context": ("parallel_config.decode_context_parallel_size", 2),
    "prefill context": ("parallel_config.prefill_context_parallel_size", 2),
    "generate": ("model_config.runner_type", "pooling"),
}


def view_of(config: Any) -> Any:
    """Returns what a configuration says, free to be changed to what vLLM itself would not take."""
    parts = ("cache_config", "model_config", "parallel_config")
    view = SimpleNamespace(**{name: getattr(config, name) for name in vars(config)})
    for name in parts:
        setattr(view, name, copy.copy(SimpleNamespace(**vars(getattr(config, name)))))
    return view


@pytest.mark.parametrize(("text", "change"), UNSUPPORTED.items())
def test_a_feature_is_refused_by_name(text: str, change: tuple[str, object]) -> None:
    """With what to do."""
    config = view_of(vllm_config(asynchronous=False))
    require_supported(config)
    path, value = change
    part, _, name = path.rpartition(".")
    setattr(getattr(config, part) if part else config, name, value)
    with pytest.raises(FeatureUnsupported, match=text):
        require_supported(config)


def test_settings_are_needed() -> None:
    """A worker or a scheduler alone does not know where the pool is."""
    config = view_of(vllm_config(asynchronous=False))
    config.additional_config = {}
    with pytest.raises(SettingInvalid):
        require_supported(config)


def test_a_version_that_was_not_tested_is_refused() -> None:
    """Unless it is asked for."""
    require_tested("0.32.4", allow_untested=False)
    require_tested("0.34.0", allow_untested=True)
    with pytest.raises(VersionUnsupported, match=r"0\.34\.0"):
        require_tested("0.34.0", allow_untested=False)


def spec(**changes: Any) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=64, num_kv_heads=1, head_size=16, dtype=torch.float32, **changes)


def test_models_of_other_attention_are_refused() -> None:
    """Windows, layers that differ, and what is not causal."""
    windows = SlidingWindowSpec(block_size=64, num_kv_heads=1, head_size=16, dtype=torch.float32, sliding_window=32)
    assert only_spec([spec(), spec()]) == spec()
    for specs in (
        [windows],
        [spec(), windows],
        [spec(), spec(head_size_v=32)],
        [spec(sliding_window=32)],
        [spec(attention_chunk_size=32)],
        [spec(non_causal=True)],
        [],
    ):
        with pytest.raises(FeatureUnsupported):
            only_spec(specs)


def test_requests_that_no_pool_of_this_size_could_hold_are_refused() -> None:
    """max_model_len has to fit beside the block that is never given out."""
    config = vllm_config(asynchronous=False)
    with pytest.raises(FeatureUnsupported, match="larger than the pool"):
        Engine("a", World(), FakeOwner(16).session(), config, config.model_config.max_model_len // BLOCK_TOKENS)
