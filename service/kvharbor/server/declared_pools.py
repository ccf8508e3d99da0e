"""Pools that the configuration declares: made before the service is ready."""

import os

import structlog

from kvharbor.gpumem import GpumemError
from kvharbor.pool.errors import PoolError
from kvharbor.server.errors import StartupError
from kvharbor.server.pools import Pools
from kvharbor.server.settings import Settings

log = structlog.get_logger(__name__)


async def make_declared(pools: Pools, settings: Settings) -> None:
    """Makes the pools with a layout, one after the other, each for its tenant.

    One that is there already, as it has outlived the process before, stays as it is: a layout or size that has
    changed meanwhile takes effect at the next cold start [S18]. Raises StartupError for one that cannot be made.
    """
    for name, rules in settings.pools.items():
        if rules.layout is None or rules.size is None:
            continue
        layout = rules.layout.layout()
        tenant = settings.tenant_of(os.geteuid()) if rules.tenant is None else rules.tenant
        try:
            served, _ = await pools.declare(tenant, name, layout, rules.size)
        except (GpumemError, PoolError) as refused:
            raise StartupError(f"setting pools.{name}: {refused}") from None
        differences = served.descriptor.layout.differences(layout)
        if differences or served.size_bytes != rules.size:
            log.warning(
                "declared pool differs from the one that is there, which stays until a cold start",
                pool=served.pool_id,
                name=name,
                size_bytes=served.size_bytes,
                declared_size_bytes=rules.size,
                layout=differences,
            )
