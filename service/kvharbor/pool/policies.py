"""The eviction policies by name."""

from typing import Final

from kvharbor.pool.eviction import EvictionPolicy, LeastRecentlyReleased
from kvharbor.pool.hit_density import HitDensity
from kvharbor.pool.results import PoolConfig
from kvharbor.pool.tree import PrefixTree

POLICIES: Final = ("auto", "lru")
"""`auto` learns from the traffic what is worth keeping; `lru` evicts what was released first."""


def policy_of(config: PoolConfig, tree: PrefixTree) -> EvictionPolicy:
    """Returns the pool's policy, with nothing to evict yet."""
    match config.policy:
        case "auto":
            return HitDensity(config.block_count, tree)
        case "lru":
            return LeastRecentlyReleased()
        case other:
            raise ValueError(f"policy is {other!r}, must be one of {', '.join(POLICIES)}")
