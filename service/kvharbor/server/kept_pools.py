"""Pools as the keeper has them: what each was made with, and its memory."""

import base64

from kvharbor.gpumem import Descriptor
from kvharbor.pool import PoolConfig
from kvharbor.server.keeper import Keeper
from kvharbor.server.served_pool import PoolFacts, ServedPool
from kvharbor.server.settings import Settings
from kvharbor.server.wire import identity_of, layout_message, layout_of
from kvharbor.v1 import types_pb2

_PREFIX = "pool/"


def pool_config(settings: Settings, name: str, descriptor: Descriptor) -> PoolConfig:
    """Returns the rules of a pool: by its layout, and by what the settings say of pools of its name now."""
    layout, rules = descriptor.layout, settings.pool_rules(name)
    return PoolConfig(
        block_count=descriptor.block_count - layout.scratch_blocks,
        block_tokens=layout.block_tokens,
        scratch_blocks=layout.scratch_blocks,
        identity=identity_of(layout),
        min_reuse_tokens=rules.min_reuse_tokens or 0,
        warm_budget_ratio=rules.warm_budget_ratio or 0.0,
    )


def keep_pool(keeper: Keeper, served: ServedPool) -> None:
    """Keeps a pool with the descriptors of its memory."""
    layout = layout_message(served.descriptor.layout).SerializeToString(deterministic=True)
    meta = {
        "pool_id": served.pool_id,
        "tenant": served.tenant,
        "name": served.name,
        "size_bytes": served.size_bytes,
        "block_count": served.descriptor.block_count,
        "layout": base64.b64encode(layout).decode(),
    }
    keeper.keep(_name(served), meta, served.memory.fds)


def drop_pool(keeper: Keeper, served: ServedPool) -> None:
    """Keeps it no longer."""
    keeper.drop(_name(served))


def kept_pools(keeper: Keeper) -> list[tuple[PoolFacts, tuple[int, int]]]:
    """Returns the pools that an earlier process has kept; the descriptors of arena and ledger are the caller's."""
    found = []
    for name, kept in keeper.kept.items():
        if name.startswith(_PREFIX):
            meta = kept.meta
            layout = layout_of(types_pb2.Layout.FromString(base64.b64decode(meta["layout"])))
            descriptor = layout.descriptor(meta["block_count"])
            facts = PoolFacts(meta["pool_id"], meta["tenant"], meta["name"], meta["size_bytes"], descriptor)
            arena, ledger = keeper.hand_over(name)
            found.append((facts, (arena, ledger)))
    return found


def _name(served: ServedPool) -> str:
    return _PREFIX + served.pool_id.partition(".")[2]
