"""Pools that the configuration declares: made before the service is ready."""

import asyncio
import os

import structlog

from kvharbor.gpumem import GpumemError, InsufficientMemory, Layout
from kvharbor.pool.errors import PoolError
from kvharbor.server.configuration.settings import Settings
from kvharbor.server.errors import StartupError
from kvharbor.server.pools.pools import Pools
from kvharbor.server.pools.served_pool import ServedPool
from kvharbor.server.process.earlier_epoch import EarlierEpoch

log = structlog.get_logger(__name__)

PAUSE_S = 1.0
REMINDER_S = 10.0


async def make_declared(pools: Pools, settings: Settings, earlier: EarlierEpoch) -> None:
    """Makes the pools with a layout, one after the other, each for its tenant.

    One that is there already, as it has outlived the process before, stays as it is: a layout or size that has
    changed meanwhile takes effect at the next cold start [S18]. Memory that workers of an earlier epoch may still have
    is waited for [S31]. Raises StartupError for one that cannot be made.
    """
    for name, rules in settings.pools.items():
        if rules.layout is None or rules.size is None:
            continue
        layout = rules.layout.layout()
        tenant = settings.tenant_of(os.geteuid()) if rules.tenant is None else rules.tenant
        try:
            served = await _declared(pools, (tenant, name), layout, rules.size, earlier)
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


async def _declared(
    pools: Pools, key: tuple[str, str], layout: Layout, size_bytes: int, earlier: EarlierEpoch
) -> ServedPool:
    """Makes one, or finds it; asks again while it may only lack what an earlier epoch's workers let go of."""
    loop = asyncio.get_running_loop()
    tenant, name = key
    refused_at: float | None = None
    told_at = 0.0
    while True:
        try:
            served, _ = await pools.declare(tenant, name, layout, size_bytes)
        except InsufficientMemory as refused:
            now = loop.time()
            refused_at = now if refused_at is None else refused_at
            if now - refused_at >= earlier.patience_s(refused):
                raise
            if not told_at or now - told_at >= REMINDER_S:
                told_at = now
                facts = {"needed_bytes": refused.needed_bytes, "available_bytes": refused.available_bytes}
                log.warning(
                    "declared pool waits for memory that workers of an earlier epoch may have",
                    name=name,
                    **facts,
                    limited_by=refused.limited_by,
                    waited_s=round(now - refused_at, 1),
                    **earlier.holders(refused),
                )
        else:
            return served
        await asyncio.sleep(PAUSE_S)
