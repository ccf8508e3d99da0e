"""transformers' continuous batching with its paged cache in a kvharbor pool, shared with other engines."""

from kvharbor.engines.transformers_cb.cache import Reuse
from kvharbor.engines.transformers_cb.errors import BatchingError, BatchingUnsupported, MemoryUnused, PoolTaken
from kvharbor.engines.transformers_cb.layout import layout_for
from kvharbor.engines.transformers_cb.manager import PooledManager, continuous_batching
from kvharbor.engines.transformers_cb.naming import this_engine

__all__ = [
    "BatchingError",
    "BatchingUnsupported",
    "MemoryUnused",
    "PoolTaken",
    "PooledManager",
    "Reuse",
    "continuous_batching",
    "layout_for",
    "this_engine",
]
