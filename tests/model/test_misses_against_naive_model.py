"""[Y1] [Y2] [Y3]: whatever happens, a miss has the reason that a diary of everything says."""

import pytest
from naive_misses import walk

from kvharbor.pool import MissKind


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "auto"])
def test_a_miss_has_its_reason(policy: str) -> None:
    """Two tenants, several namespaces, all reasons; evictions for sessions of both and by an administrator."""
    worlds = [walk(seed, 200, policy) for seed in range(20)]
    assert all(sum(world.given[kind] for world in worlds) > 5 for kind in MissKind)
