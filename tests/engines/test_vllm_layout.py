"""The pool's descriptor and vLLM's own plan of its KV cache: the same bytes for every page."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheLayout

from engines.scheduler_configs import vllm_config
from kvharbor.engines.vllm import ContractBroken, FeatureUnsupported
from kvharbor.engines.vllm.layout import known_part, layout_for, require_known_part, require_same_places
from kvharbor.gpumem import BlockOrder, DataType, Layout

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups
except ModuleNotFoundError:  # before 0.33
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups

pytestmark = pytest.mark.timeout(300)

LAYERS = ("layer.0", "layer.1", "layer.2")
SPEC = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
BLOCK_COUNT = 7


class Backend:
    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN"


def planned(order: str) -> tuple[Layout, KVCacheConfig, Any]:
    """Returns our layout and vLLM's plan for a physical order, with the configuration that both are of."""
    config = vllm_config(asynchronous=False)
    config.cache_config.kv_cache_layout = order
    layout = layout_for(config, dict.fromkeys(LAYERS, SPEC), dict.fromkeys(LAYERS, Backend), "model")
    groups = [KVCacheGroupSpec([*LAYERS], SPEC)]
    return layout, get_kv_cache_config_from_groups(config, groups, BLOCK_COUNT * layout.block_bytes), config


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "BLNHC", "BLHNC"])
def test_every_page_is_where_vllm_has_it(order: str) -> None:
    """Layer by layer and block by block, in as many bytes."""
    layout, plan, _ = planned(order)
    descriptor = layout.descriptor(BLOCK_COUNT)
    require_same_places(plan, descriptor)
    assert plan.num_blocks == BLOCK_COUNT
    (tensor,) = plan.kv_cache_tensors
    for index in range(len(LAYERS)):
        for block in range(BLOCK_COUNT):
            start = tensor.offset + index * tensor.layer_stride + block * tensor.block_stride
            assert descriptor.page_offset_bytes("kv", index, block) == start
    assert layout.order is (BlockOrder.BLOCK_MAJOR if order[0] == "B" else BlockOrder.LAYER_MAJOR)
    assert layout.planes[0].data_type is DataType.BFLOAT16
    assert layout.planes[0].interior.startswith("vllm-0.3")
    assert f"flash_attn-{order.lower()}" in layout.planes[0].interior


def test_a_plan_that_differs_is_refused() -> None:
    """By a byte, by a block, by a layer."""
    layout, plan, _ = planned("LBNHC")
    (tensor,) = plan.kv_cache_tensors
    with pytest.raises(ContractBroken):
        require_same_places(plan, layout.descriptor(BLOCK_COUNT + 1))
    for change in ({"offset": 16}, {"block_stride": 16}, {"layers": [*LAYERS[:2]]}):
        moved = dataclasses.replace(plan, kv_cache_tensors=[dataclasses.replace(tensor, **change)])
        with pytest.raises(ContractBroken):
            require_same_places(moved, layout.descriptor(BLOCK_COUNT))


def test_orders_in_which_a_page_is_in_pieces_are_refused() -> None:
    """A block would not be one page a layer."""
    assert not KVCacheLayout.LHBNC.is_block_compact
    with pytest.raises(FeatureUnsupported, match="pages in pieces"):
        planned("LHBNC")


def test_a_scheduler_knows_all_of_a_layout_but_weights_and_interior() -> None:
    """What it compares where the workers are other processes."""
    layout, plan, config = planned("LBNHC")
    own = known_part(config, plan)
    require_known_part(layout, own)
    (plane,) = layout.planes
    others = [
        dataclasses.replace(layout, tp_size=2),
        dataclasses.replace(layout, scratch_blocks=2),
        dataclasses.replace(layout, planes=(dataclasses.replace(plane, layer_count=4),)),
        dataclasses.replace(layout, planes=(dataclasses.replace(plane, interior="vllm-0.1.0-flash_attn"),)),
    ]
    for other in others:
        with pytest.raises(ContractBroken):
            require_known_part(other, own)


def test_layers_of_several_backends_are_refused() -> None:
    """The insides of their pages may differ."""
    config = vllm_config(asynchronous=False)
    config.cache_config.kv_cache_layout = "LBNHC"
    backends = {**dict.fromkeys(LAYERS, Backend), LAYERS[1]: SimpleNamespace(get_name=lambda: "TRITON_ATTN")}
    with pytest.raises(FeatureUnsupported, match="several attention backends"):
        layout_for(config, dict.fromkeys(LAYERS, SPEC), backends, "model")
