"""Which pool a name means, where an administrator sees those of all tenants."""

import pytest

from kvharbor.client import PoolAmbiguous, PoolInfo, PoolNotFound
from kvharbor.client.pool_names import pool_named


def pool_of(tenant: str, name: str = "main") -> PoolInfo:
    return PoolInfo(
        pool_id=f"id-{tenant}",
        name=name,
        tenant=tenant,
        epoch="e",
        arena_kind="host",
        model="m",
        block_tokens=16,
        block_count=4,
        size_bytes=1,
    )


ALL = [pool_of("a"), pool_of("b"), pool_of("own"), pool_of("other", "spare")]


def named(name: str, tenant: str | None = None, own: str = "own", pools: list[PoolInfo] = ALL) -> str:
    return pool_named(name, pools, tenant=tenant, own_tenant=own).tenant


def test_the_own_tenants_pool_is_meant_whatever_the_order() -> None:
    """Listed behind others of its name, and before them."""
    assert named("main") == named("main", pools=ALL[::-1]) == "own"


def test_the_only_pool_of_a_name_needs_no_tenant() -> None:
    """Whoever's it is, and who the caller is not known, over TCP."""
    assert named("spare") == named("spare", own="") == "other"


def test_a_name_of_several_others_is_refused_with_tenants_and_ids() -> None:
    """Nothing is taken by chance; one of them may be named."""
    with pytest.raises(
        PoolAmbiguous, match=r"3 tenants have a pool named 'main': a \(id-a\), b \(id-b\), own"
    ) as found:
        named("main", own="stranger")
    assert found.value.metadata == {"name": "main", "tenants": "a,b,own", "poolIds": "id-a,id-b,id-own"}
    assert named("main", "b", own="stranger") == "b"


def test_a_tenant_that_has_none_is_told_so() -> None:
    """Not even the own tenant's is taken instead."""
    with pytest.raises(PoolNotFound, match="no pool of tenant c is named 'main'"):
        named("main", "c")
    with pytest.raises(PoolNotFound, match="no pool is named 'lost'"):
        named("lost")
