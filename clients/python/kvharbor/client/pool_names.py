"""Which pool a name means. It is one in each tenant, and an administrator sees all tenants'."""

from collections.abc import Iterable

from kvharbor.client.errors import PoolAmbiguous, PoolNotFound
from kvharbor.client.results import PoolInfo


def pool_named(name: str, pools: Iterable[PoolInfo], *, tenant: str | None, own_tenant: str) -> PoolInfo:
    """Returns the pool of this name: of `tenant`, if given; else of the caller's own, else the only one there is.

    Raises PoolNotFound, and PoolAmbiguous where several tenants but not the caller's have one.
    """
    found = [pool for pool in pools if pool.name == name and tenant in (None, pool.tenant)]
    if not found:
        raise pool_not_found(name, tenant)
    own = [pool for pool in found if pool.tenant == own_tenant]
    if not own and len(found) > 1:
        raise _ambiguous(name, found)
    return (own or found)[0]


def pool_not_found(name: str, tenant: str | None = None) -> PoolNotFound:
    """Returns the error for a name that no pool has, of the tenant or of those that the caller may see."""
    of_tenant = "" if tenant is None else f" of tenant {tenant}"
    return PoolNotFound(
        f"no pool{of_tenant} is named {name!r}: a worker has to open it first, with its layout; "
        "`kvharbor stats` shows those that are there",
        metadata={"name": name} | ({} if tenant is None else {"tenant": tenant}),
    )


def _ambiguous(name: str, found: list[PoolInfo]) -> PoolAmbiguous:
    tenants = ", ".join(f"{pool.tenant} ({pool.pool_id})" for pool in found)
    return PoolAmbiguous(
        f"{len(found)} tenants have a pool named {name!r}: {tenants}; say whose is meant, with tenant (--tenant)",
        metadata={
            "name": name,
            "tenants": ",".join(pool.tenant for pool in found),
            "poolIds": ",".join(pool.pool_id for pool in found),
        },
    )
