"""What a trace can be replayed with: the pool's policies, and the offline optimum as their bound."""

from collections.abc import Sequence
from typing import Final

from kvharbor.pool import POLICIES
from kvharbor.server.replay.cache import Cache
from kvharbor.server.replay.optimum import OfflineOptimum
from kvharbor.server.replay.pool_cache import PoolCache
from kvharbor.server.traces.trace import Request

OPTIMUM: Final = "min"
NAMES: Final = (*POLICIES, OPTIMUM)


def cache_of(policy: str, block_count: int, requests: Sequence[Request]) -> Cache:
    """Returns empty memory that one of NAMES runs, for exactly these requests in this order."""
    if policy == OPTIMUM:
        return OfflineOptimum(requests, block_count)
    return PoolCache(block_count, policy)
