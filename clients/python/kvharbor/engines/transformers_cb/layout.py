"""The pool layout of transformers' paged cache: `[block, layer, K and V, token, head, dim]`.

That is the block-major order of kvharbor, with two scratch blocks: padding rows read the first, which stays
zero, and write the second.
"""

from typing import Any

from transformers.generation.continuous_batching.cache import group_layers_by_attn_type
from transformers.generation.continuous_batching.cache_allocators import FULL_ATTENTION
from transformers.generation.continuous_batching.utils import find_head_dim, find_num_key_value_heads

from kvharbor.engines.transformers.identity import model_identity
from kvharbor.engines.transformers.layout import rotations_by_length
from kvharbor.engines.transformers_cb.errors import BatchingUnsupported
from kvharbor.gpumem import BlockOrder, DataType, Layout

SCRATCH_BLOCKS = 2
SECTOR_ALIGNMENT_BYTES = 128


def layout_for(model: Any, block_tokens: int = 64) -> Layout:
    """Returns the layout to open a pool with: planes "k" and "v" as the paged cache of this model has them.

    Reads all weights for the identity (about a second for 135 M parameters). A pool of this layout serves the
    `Worker` of kvharbor.engines.transformers as well, if that can run the model. Raises BatchingUnsupported.
    """
    config = model.config.get_text_config()
    _refuse(config)
    layout = Layout.attention(
        model_identity(model),
        config.num_hidden_layers,
        find_num_key_value_heads(config),
        find_head_dim(config),
        _data_type(model),
        block_tokens,
        order=BlockOrder.BLOCK_MAJOR,
        scratch_blocks=SCRATCH_BLOCKS,
    )
    if layout.block_bytes % SECTOR_ALIGNMENT_BYTES:
        raise BatchingUnsupported(
            f"blocks that are no multiple of {SECTOR_ALIGNMENT_BYTES} bytes", layout.block_bytes, "take larger blocks"
        )
    return layout


def _refuse(config: Any) -> None:
    try:
        kinds = group_layers_by_attn_type(config)
    except ValueError as unknown:
        raise BatchingUnsupported("layers of other kinds", str(unknown), "use a model of full attention") from unknown
    if others := [kind for kind in kinds if kind != FULL_ATTENTION]:
        raise BatchingUnsupported(f"layers of {others[0]}", kinds, "use a model of full attention only")
    if kinds[FULL_ATTENTION] != list(range(config.num_hidden_layers)):
        raise BatchingUnsupported("layers without K and V", kinds, "use a model whose layers all have their own")
    if changing := rotations_by_length(config):
        raise BatchingUnsupported("rotations that depend on length", changing, "use a model with a fixed one")


def _data_type(model: Any) -> DataType:
    kind = str(model.dtype).removeprefix("torch.")
    if kind not in {"float32", "float16", "bfloat16"}:
        raise BatchingUnsupported("K and V of this type", kind, "load the model in float32 or 16 bits")
    return DataType(kind)
