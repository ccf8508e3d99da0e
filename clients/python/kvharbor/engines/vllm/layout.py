"""The pool layout that a vLLM engine needs, and the check that vLLM addresses its pages exactly so.

To kvharbor a block of vLLM is one opaque page a layer, K and V together: what is inside depends on the attention
backend, on a CPU even on its instruction set, and on the version of vLLM. All of that is in the page's interior tag
[E25], so that engines that would read each other's bytes wrong never share a pool.
"""

from collections.abc import Mapping
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from kvharbor.engines.vllm.errors import ContractBroken, FeatureUnsupported
from kvharbor.engines.vllm.versions import vllm_version
from kvharbor.gpumem import BlockOrder, DataType, Descriptor, Layout, Plane

PLANE = "kv"
NULL_BLOCKS = 1
"""vLLM's block 0, which padding is written to: the pool's scratch block."""


def layout_for(
    vllm_config: Any, specs: Mapping[str, FullAttentionSpec], backends: Mapping[str, Any], model: str
) -> Layout:
    """Returns the layout of one rank's part: plane "kv", a page for each layer in the order of `specs`.

    `specs` are vLLM's by name of layer, `backends` the attention backends (classes) of the same layers, and `model`
    the identity of the weights. Raises FeatureUnsupported unless all layers are equal and of plain full attention.
    """
    spec = only_spec(specs.values())
    order = vllm_config.cache_config.get_resolved_kv_cache_layout()
    if not order.is_block_compact:
        raise FeatureUnsupported(
            "pages in pieces", f"layout {order.name}", "set VLLM_KV_CACHE_LAYOUT to LBNHC or BLNHC"
        )
    names = {backends[layer].get_name() for layer in specs}
    if len(names) != 1:
        raise FeatureUnsupported("layers of several attention backends", sorted(names), "choose one for all")
    return Layout(
        model,
        spec.block_size,
        (
            Plane(
                PLANE,
                layer_count=len(specs),
                data_type=_data_type(spec.dtype),
                page_bytes=spec.page_size_bytes,
                interior=_interior(vllm_config, spec, names.pop(), order.name),
            ),
        ),
        order=BlockOrder.BLOCK_MAJOR if order.is_block_outermost else BlockOrder.LAYER_MAJOR,
        tp_size=vllm_config.parallel_config.tensor_parallel_size,
        scratch_blocks=NULL_BLOCKS,
    )


def only_spec(specs: Any) -> FullAttentionSpec:
    """Returns what all layers have in common; raises FeatureUnsupported unless that is plain full attention."""
    kinds = {*specs}
    if len(kinds) != 1 or type(next(iter(kinds))) is not FullAttentionSpec:
        found = ", ".join(sorted(type(each).__name__ for each in kinds)) or "none"
        raise FeatureUnsupported(
            "models whose layers differ or are not of plain full attention", found, "use a model of full attention only"
        )
    kind: Any = kinds.pop()
    if kind.sliding_window is not None or kind.attention_chunk_size is not None:
        raise FeatureUnsupported(
            "attention over a window",
            f"of {kind.sliding_window or kind.attention_chunk_size} tokens",
            "use another model",
        )
    if kind.non_causal:
        raise FeatureUnsupported("attention that is not causal", "non_causal", "use another model")
    return kind


def require_same_places(config: KVCacheConfig, descriptor: Descriptor) -> None:
    """Raises ContractBroken unless vLLM puts every page where the pool's descriptor says."""
    span = descriptor.span(PLANE)
    layer = 0
    for tensor in config.kv_cache_tensors:
        for index in range(len(tensor.layers)):
            own = (tensor.size, tensor.offset + index * tensor.layer_stride, tensor.block_stride)
            pools = (
                descriptor.size_bytes,
                span.offset_bytes + layer * span.layer_stride_bytes,
                span.block_stride_bytes,
            )
            if own != pools:
                raise ContractBroken(
                    f"vLLM has layer {tensor.layers[index]} at (bytes in all, offset, bytes a block) {own},"
                    f" the pool at {pools}"
                )
            layer += 1
    if (layer, config.num_blocks) != (span.plane.layer_count, descriptor.block_count):
        raise ContractBroken(
            f"vLLM has {layer} layers of {config.num_blocks} blocks, the pool {span.plane.layer_count} of"
            f" {descriptor.block_count}"
        )


def require_known_part(layout: Layout, own: Mapping[str, object]) -> None:
    """Raises ContractBroken unless a pool's layout has the values that a process without the weights knows as well."""
    plane = layout.planes[0]
    pools = {
        "planes": len(layout.planes),
        "block_tokens": layout.block_tokens,
        "layer_count": plane.layer_count,
        "page_bytes": plane.page_bytes,
        "data_type": plane.data_type,
        "tp_size": layout.tp_size,
        "scratch_blocks": layout.scratch_blocks,
    }
    differing = {name: (pools[name], value) for name, value in own.items() if pools[name] != value}
    if differing or not plane.interior.startswith(f"{version_tag()}-"):
        raise ContractBroken(
            f"the scheduler needs another layout than the pool that the workers have opened: {differing},"
            f" interior {plane.interior} for {version_tag()}"
        )


def known_part(vllm_config: Any, config: KVCacheConfig) -> dict[str, object]:
    """Returns what `require_known_part` compares, as vLLM's scheduler has it."""
    spec = only_spec([group.kv_cache_spec for group in config.kv_cache_groups])
    return {
        "planes": 1,
        "block_tokens": spec.block_size,
        "layer_count": sum(len(group.layer_names) for group in config.kv_cache_groups),
        "page_bytes": spec.page_size_bytes,
        "data_type": _data_type(spec.dtype),
        "tp_size": vllm_config.parallel_config.tensor_parallel_size,
        "scratch_blocks": NULL_BLOCKS,
    }


def version_tag() -> str:
    """Returns the beginning of every interior tag of this vLLM."""
    return f"vllm-{vllm_version()}"


def _interior(vllm_config: Any, spec: FullAttentionSpec, backend: str, order: str) -> str:
    kind = [version_tag(), backend.lower(), order.lower()]
    if current_platform.is_cpu():
        # A page is transposed or tiled as the instructions want it that this machine has.
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        cache_dtype = vllm_config.cache_config.cache_dtype
        kind.append(_get_attn_isa(vllm_config.model_config.dtype, spec.block_size, spec.head_size, cache_dtype))
    if spec.kv_quant_mode:
        kind.append(spec.kv_quant_mode.name.lower())
    return "-".join(kind)


def _data_type(dtype: Any) -> DataType:
    name = str(dtype).removeprefix("torch.")
    try:
        return DataType(name)
    except ValueError:
        known = ", ".join(each.value for each in DataType)
        raise FeatureUnsupported("a KV cache of this type", name, f"use one of {known}") from None
