"""What is supported, and what is refused by name before anything is computed."""

import copy
import importlib.metadata
from typing import Any

from kvharbor.client import Pool
from kvharbor.engines.transformers_cb.errors import BatchingUnsupported
from kvharbor.engines.transformers_cb.layout import layout_for
from kvharbor.engines.transformers_cb.scheduler import SCHEDULERS

VERSION = "5.24"
"""Continuous batching changes from one version to the next; a test pins what is relied on of this one."""


def require_version() -> None:
    """Raises BatchingUnsupported with another transformers than the one that this is written for."""
    installed = importlib.metadata.version("transformers")
    if installed.split(".")[:2] != VERSION.split("."):
        raise BatchingUnsupported("this version of transformers", installed, f"install transformers {VERSION}")


def require_pool(model: Any, pool: Pool) -> None:
    """Raises LayoutMismatch unless the pool is one for this model's paged cache, BatchingUnsupported for the rest."""
    pool.descriptor.layout.require_equal(layout_for(model, pool.block_tokens))
    if model.device.type != "cpu":
        raise BatchingUnsupported("models off the CPU", model.device, "move the model to the CPU")


def settings_over(pool: Pool, settings: Any) -> Any:
    """Fills in what follows from the pool; raises BatchingUnsupported for what does not go with one."""
    layout = pool.descriptor.layout
    usable = pool.descriptor.block_count - layout.scratch_blocks
    settings.page_size = layout.block_tokens
    if settings.num_blocks not in (None, usable):
        raise BatchingUnsupported("a part of the pool", settings.num_blocks, "leave num_blocks alone")
    settings.num_blocks = usable
    if not settings.allow_block_sharing:
        raise BatchingUnsupported("allow_block_sharing off", False, "leave it on, or use transformers' own manager")
    if settings.use_async_batching:
        # A step would still write blocks that the one after it has given to other engines.
        raise BatchingUnsupported("use_async_batching", True, "leave it off")
    settings.use_async_batching = False
    if settings.cpu_offload_space:
        raise BatchingUnsupported("cpu_offload_space", settings.cpu_offload_space, "make the pool larger")
    if settings.scheduler_type not in SCHEDULERS:
        raise BatchingUnsupported("this scheduler", settings.scheduler_type, f"use one of {', '.join(SCHEDULERS)}")
    return settings


def require_resolved(settings: Any, distributed_helper: Any) -> None:
    """Raises BatchingUnsupported for what only shows once transformers has resolved its settings."""
    if distributed_helper.tp_size > 1:
        raise BatchingUnsupported("tensor parallelism", distributed_helper.tp_size, "run one process a model")
    if settings.use_async_batching:
        raise BatchingUnsupported("use_async_batching", True, "leave it off")


def with_stop_token(generation_config: Any) -> Any:
    """Returns the settings with the stop token that continuous batching needs: one that never comes, if none is set."""
    if generation_config.eos_token_id is not None:
        return generation_config
    own = copy.deepcopy(generation_config)
    own.eos_token_id = -1
    return own
