"""What continuous batching over a pool refuses, by name and before anything is computed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig

from kvharbor.engines.transformers import layout_for as worker_layout_for
from kvharbor.engines.transformers_cb import BatchingUnsupported, MemoryUnused, PooledManager, layout_for, support
from kvharbor.engines.transformers_cb.memory import ArenaAllocation
from kvharbor.gpumem import BlockOrder, LayoutMismatch
from tiny_models import DECODERS, decoder

BLOCK_TOKENS = 16


def pool_of(layout: Any) -> Any:
    """As much of a pool as is looked at before its memory."""
    return SimpleNamespace(descriptor=layout.descriptor(20), block_tokens=layout.block_tokens, name="p")


# The others' small configurations have a number of K/V heads by which transformers would go, and the model does not.
@pytest.mark.parametrize("kind", sorted(DECODERS.keys() - {"GPTNeoX", "GPT2"}))
def test_the_layout_is_the_workers(kind: str) -> None:
    """Block-major, with two scratch blocks: else what the worker of transformers finds by watching the model."""
    own = layout_for(decoder(kind), BLOCK_TOKENS)
    workers = worker_layout_for(decoder(kind), BLOCK_TOKENS, BlockOrder.BLOCK_MAJOR)
    assert own.differences(workers) == {"scratch_blocks": ("2", "1")}


@pytest.mark.parametrize(
    ("kind", "settings", "feature"),
    [
        ("Mistral", {"sliding_window": 32}, "sliding_attention"),
        ("Gemma2", {"head_dim": 16, "pad_token_id": 0}, "sliding_attention"),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rotations"),
    ],
)
def test_other_attention_is_refused(kind: str, settings: dict[str, Any], feature: str) -> None:
    """Windows, hybrids of them, and rotations by length."""
    with pytest.raises(BatchingUnsupported, match=feature):
        layout_for(decoder(kind, **settings), BLOCK_TOKENS)


def test_layers_that_keep_no_k_and_v_are_refused() -> None:
    """Such as those of linear attention."""
    model = decoder("Llama")
    model.config.layer_types = ["full_attention", "linear_attention", "full_attention"]
    with pytest.raises(BatchingUnsupported, match="other kinds"):
        layout_for(model, BLOCK_TOKENS)


def test_pages_that_the_paged_cache_cannot_take_are_refused() -> None:
    """Of another type, and of a size that it would not lay end to end."""
    with pytest.raises(BatchingUnsupported, match="this type"):
        layout_for(decoder("Llama").to(torch.float64), BLOCK_TOKENS)
    thin = decoder("Llama", num_key_value_heads=1, head_dim=1).to(torch.bfloat16)
    with pytest.raises(BatchingUnsupported, match="multiple of 128"):
        layout_for(thin, BLOCK_TOKENS)


@pytest.mark.parametrize(
    ("settings", "feature"),
    [
        ({"use_async_batching": True}, "use_async_batching"),
        ({"allow_block_sharing": False}, "allow_block_sharing"),
        ({"cpu_offload_space": 1.0}, "cpu_offload_space"),
        ({"num_blocks": 5}, "a part of the pool"),
        ({"scheduler_type": "mine"}, "this scheduler"),
    ],
)
def test_settings_that_do_not_go_with_a_pool_are_refused(settings: dict[str, Any], feature: str) -> None:
    """Named with the remedy."""
    model = decoder("Llama")
    with pytest.raises(BatchingUnsupported, match=feature):
        PooledManager(
            model,
            pool_of(layout_for(model, BLOCK_TOKENS)),
            continuous_batching_config=ContinuousBatchingConfig(**settings),
        )


def test_another_models_pool_is_refused() -> None:
    """Equal shapes are not enough, and neither is another number of scratch blocks."""
    model, other = decoder("Llama"), decoder("Llama")
    other.model.layers[0].mlp.up_proj.weight.data *= 1.01
    with pytest.raises(LayoutMismatch, match="model"):
        PooledManager(other, pool_of(layout_for(model, BLOCK_TOKENS)))
    with pytest.raises(LayoutMismatch, match="scratch_blocks"):
        PooledManager(model, pool_of(worker_layout_for(model, BLOCK_TOKENS, BlockOrder.BLOCK_MAJOR)))


def test_another_version_of_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is relied on is no public interface."""
    monkeypatch.setattr("importlib.metadata.version", lambda _: "5.25.1")
    with pytest.raises(BatchingUnsupported, match=r"5\.25\.1"):
        support.require_version()


def test_the_one_allocation_is_answered_once_and_in_full() -> None:
    """Of another size, or a second one, it is an error; all else is torch's affair."""
    arena = torch.empty(256, dtype=torch.uint8)
    with ArenaAllocation(arena) as allocation:
        assert torch.zeros(8).dtype == torch.float32
        with pytest.raises(MemoryUnused):
            torch.zeros(255, dtype=torch.uint8)
        assert torch.zeros(256, dtype=torch.uint8, device="cpu") is arena
        with pytest.raises(MemoryUnused):
            torch.zeros(256, dtype=torch.uint8)
    assert allocation.answered == 1
    assert torch.zeros(256, dtype=torch.uint8) is not arena
