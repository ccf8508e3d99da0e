"""Pools as the keeper has them: what each was made with, and its memory.

A pool is kept under "pool/<n>" with its ledger and its status page, each of its parts under a name below. The pool
comes last and goes first: parts without one are those of a pool that nobody was told of, or that is dropped.
"""

import base64
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import structlog

from kvharbor.gpumem import ArenaKind, Descriptor, Export
from kvharbor.pool import PoolConfig
from kvharbor.server.configuration.settings import Settings
from kvharbor.server.memory.budget import HOST
from kvharbor.server.memory.part import Part
from kvharbor.server.messages.layouts import identity_of, layout_message, layout_of
from kvharbor.server.pools.served_pool import PoolFacts, ServedPool
from kvharbor.server.supervision.keeper import Keeper
from kvharbor.v1 import types_pb2

log = structlog.get_logger(__name__)

_POOL = "pool/"
_PART = "/part/"


@dataclass(frozen=True, slots=True)
class KeptPart:
    """A part with its descriptors, which are whoever's has it; `allocation` as Part says."""

    export: Export
    allocation: str


@dataclass(frozen=True, slots=True)
class KeptPool:
    """A pool that an earlier process has kept. The descriptors of ledger, page and parts are whoever's has it.

    A process of a version without status pages has kept none.
    """

    facts: PoolFacts
    ledger_fd: int
    page_fd: int | None
    parts: tuple[KeptPart, ...]


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
        policy=rules.eviction_policy or "lru",
        history=True,
    )


def keep_pool(keeper: Keeper, served: ServedPool) -> None:
    """Keeps a pool with the descriptors of its memory."""
    name = _name(served)
    for rank, part in enumerate(served.memory.parts):
        keeper.keep(f"{name}{_PART}{rank}", _part_facts(part), part.export.fds)
    layout = layout_message(served.descriptor.layout).SerializeToString(deterministic=True)
    meta = {
        "pool_id": served.pool_id,
        "tenant": served.tenant,
        "name": served.name,
        "size_bytes": served.size_bytes,
        "block_count": served.descriptor.block_count,
        "layout": base64.b64encode(layout).decode(),
        "part_count": len(served.memory.parts),
    }
    keeper.keep(name, meta, (served.memory.ledger.arena.fd, served.page.fd))


def drop_pool(keeper: Keeper, served: ServedPool) -> None:
    """Keeps it no longer."""
    name = _name(served)
    keeper.drop(name)
    for rank in range(len(served.memory.parts)):
        keeper.drop(f"{name}{_PART}{rank}")


def kept_pools(keeper: Keeper) -> list[KeptPool]:
    """Returns the pools that an earlier process has kept, and keeps what is not whole no longer."""
    names = [name for name in keeper.kept if name.startswith(_POOL)]
    whole = [name for name in names if _PART not in name and _is_whole(keeper, name)]
    for name in names:
        if name.partition(_PART)[0] not in whole:
            log.warning("what is kept of a pool is not whole and is dropped", name=name)
            keeper.drop(name)
    return [_handed_over(keeper, name) for name in whole]


def kept_allocations(keeper: Keeper) -> list[str]:
    """Returns the names that the keepers of devices have for the memory of kept pools; all others mean nothing."""
    pools = [name for name in keeper.kept if name.startswith(_POOL) and _PART not in name and _is_whole(keeper, name)]
    parts = [part for name in pools for part in _part_names(keeper, name)]
    return [allocation for part in parts if (allocation := keeper.kept[part].meta["allocation"])]


def _handed_over(keeper: Keeper, name: str) -> KeptPool:
    meta = keeper.kept[name].meta
    layout = layout_of(types_pb2.Layout.FromString(base64.b64decode(meta["layout"])))
    parts = tuple(_kept_part(keeper.kept[each].meta, keeper.hand_over(each)) for each in _part_names(keeper, name))
    facts = PoolFacts(
        pool_id=meta["pool_id"],
        tenant=meta["tenant"],
        name=meta["name"],
        size_bytes=meta["size_bytes"],
        descriptor=layout.descriptor(meta["block_count"]),
        places=tuple(part.export.device or HOST for part in parts),
    )
    ledger_fd, *page_fds = keeper.hand_over(name)
    return KeptPool(facts, ledger_fd, page_fds[0] if page_fds else None, parts)


def _part_facts(part: Part) -> dict[str, Any]:
    export = part.export
    return {
        "kind": export.kind.value,
        "size_bytes": export.size_bytes,
        "device": export.device,
        "offset_bytes": export.offset_bytes,
        "ipc_handle": base64.b64encode(export.ipc_handle).decode(),
        "exporter_pid": export.exporter_pid,
        "chunk_bytes": export.chunk_bytes,
        "allocation": part.allocation,
    }


def _kept_part(meta: dict[str, Any], fds: Iterable[int]) -> KeptPart:
    export = Export(
        kind=ArenaKind(meta["kind"]),
        size_bytes=meta["size_bytes"],
        fds=tuple(fds),
        device=meta["device"],
        offset_bytes=meta["offset_bytes"],
        ipc_handle=base64.b64decode(meta["ipc_handle"]),
        exporter_pid=meta["exporter_pid"],
        chunk_bytes=tuple(meta["chunk_bytes"]),
    )
    return KeptPart(export, meta["allocation"])


def _is_whole(keeper: Keeper, name: str) -> bool:
    parts = _part_names(keeper, name)
    return bool(parts) and all(part in keeper.kept for part in parts)


def _part_names(keeper: Keeper, name: str) -> list[str]:
    # A process of a version without parts has kept none.
    return [f"{name}{_PART}{rank}" for rank in range(keeper.kept[name].meta.get("part_count", 0))]


def _name(served: ServedPool) -> str:
    return _POOL + served.pool_id.partition(".")[2]
