"""Reads replies into the values of `results`."""

import dataclasses
from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np

from kvharbor.client import descriptors, traffic
from kvharbor.client.durations import seconds
from kvharbor.client.engines import engine_stats
from kvharbor.client.pending import Pending
from kvharbor.client.pins import pin_stats
from kvharbor.client.pool_names import pool_not_found
from kvharbor.client.results import (
    BlocksRemoved,
    BlocksStored,
    ExtraKey,
    Lookup,
    Namespace,
    PinEnded,
    PoolCounters,
    PoolInfo,
    PoolStats,
    PoolT,
    Progress,
    SequenceT,
    ServiceStats,
    TenantStats,
    Warm,
    WarmOrder,
    WarmTask,
    WatchEvent,
)
from kvharbor.gpumem import Layout, LayoutInvalid
from kvharbor.v1 import cache_service_pb2, types_pb2

_DIGEST_BYTES = 32
_Record = TypeVar("_Record", PoolStats, PoolCounters, TenantStats)


def as_it_is(reply: Any) -> Any:
    """Reads a reply that needs no reading."""
    return reply


def lookup(reply: cache_service_pb2.LookupResponse) -> Lookup:
    """Reads a LookupResponse."""
    return Lookup(reply.present_tokens, reply.cached_tokens, traffic.miss(reply))


def pending(reply: cache_service_pb2.AllocateResponse) -> Pending | None:
    """Reads what an AllocateResponse says of other sessions' work; None: nothing."""
    if not reply.HasField("pending"):
        return None
    told = reply.pending
    return Pending(told.token_count, told.session_id, seconds(told.idle))


def warm(reply: cache_service_pb2.WarmupResponse, sequence: SequenceT | None) -> Warm[SequenceT]:
    """Reads a WarmupResponse, whose sequence the caller has made its own kind of."""
    ttl_s = seconds(reply.ttl) if reply.HasField("ttl") else None
    return Warm(reply.pinned_tokens, reply.missing_tokens, ttl_s, sequence)


def warm_order(reply: cache_service_pb2.WarmupResponse) -> WarmOrder:
    """Reads the WarmupResponse of an order to engines."""
    return WarmOrder(
        pinned_tokens=reply.pinned_tokens,
        missing_tokens=reply.missing_tokens,
        ttl_s=seconds(reply.ttl) if reply.HasField("ttl") else None,
        task_pending=reply.task_pending,
        accepting_session_count=reply.accepting_session_count,
    )


def warm_task(
    reply: cache_service_pb2.ClaimWarmTaskResponse, pool: PoolT, sequence: SequenceT
) -> WarmTask[PoolT, SequenceT]:
    """Reads a ClaimWarmTaskResponse, whose sequence the caller has made its own kind of."""
    namespace = reply.namespace
    return WarmTask(
        pool=pool,
        name=reply.name,
        tokens=np.frombuffer(reply.token_ids, "<u4").astype(np.uint32, copy=False),
        extra_keys=tuple(ExtraKey(key.token_offset, key.value) for key in reply.extra_keys),
        namespace=Namespace(namespace.version, namespace.adapter, namespace.salt),
        sequence=sequence,
        ttl_s=seconds(reply.ttl) if reply.HasField("ttl") else None,
    )


def pool_info(message: types_pb2.PoolDescriptor) -> PoolInfo:
    """Reads what tools need of a descriptor; a layout newer than this client is no obstacle."""
    return PoolInfo(
        pool_id=message.pool_id,
        name=message.name,
        tenant=message.tenant,
        epoch=message.epoch,
        arena_kind=message.arena_kind,
        model=message.layout.model,
        block_tokens=message.layout.block_tokens,
        block_count=message.block_count,
        size_bytes=message.size_bytes,
        devices=descriptors.devices_of(message),
        layout=_known_layout(message),
    )


def _known_layout(message: types_pb2.PoolDescriptor) -> Layout | None:
    try:
        return descriptors.layout_from(message.layout)
    except (KeyError, LayoutInvalid):
        return None


def service_stats(reply: cache_service_pb2.StatsResponse, pool_name: str | None, tenant: str | None) -> ServiceStats:
    """Reads a StatsResponse; of the pools only those of the name and of the tenant, where they are given."""
    pools = tuple(
        _pool_stats(pool) for pool in reply.pools if pool_name in (None, pool.name) and tenant in (None, pool.tenant)
    )
    if pool_name is not None and not pools:
        raise pool_not_found(pool_name, tenant)
    return ServiceStats(pools, reply.session_count)


def only_pool(reply: cache_service_pb2.StatsResponse) -> PoolStats:
    """Reads the StatsResponse of one pool."""
    (pool,) = reply.pools
    return _pool_stats(pool)


def watch_events(reply: cache_service_pb2.WatchResponse) -> Iterator[WatchEvent]:
    """Yields what one message of a watch tells, in order."""
    kind = reply.WhichOneof("response")
    if kind == "snapshot":
        for stored in reply.snapshot.stored:
            yield _stored(reply.snapshot.revision, stored)
        if reply.snapshot.complete:
            yield Progress(reply.snapshot.revision)
    elif kind == "events":
        for event in reply.events.events:
            yield from _event(event)
    elif kind == "progress":
        yield Progress(reply.progress.revision)


def _event(event: cache_service_pb2.WatchEvent) -> Iterator[WatchEvent]:
    kind = event.WhichOneof("event")
    if kind == "stored":
        yield _stored(event.revision, event.stored)
    elif kind == "removed":
        yield BlocksRemoved(event.revision, _digests(event.removed.digests))
    elif kind == "pin_ended":
        yield PinEnded(event.revision, event.pin_ended.name, event.pin_ended.expired)


def _stored(revision: int, stored: cache_service_pb2.StoredBlocks) -> BlocksStored:
    return BlocksStored(
        revision=revision,
        parent_digest=stored.parent_digest,
        digests=_digests(stored.digests),
        block_ids=tuple(np.frombuffer(stored.blocks.block_ids, "<u4").tolist()),
        generations=tuple(np.frombuffer(stored.blocks.generations, "<u8").tolist()),
    )


def _digests(joined: bytes) -> tuple[bytes, ...]:
    return tuple(joined[at : at + _DIGEST_BYTES] for at in range(0, len(joined), _DIGEST_BYTES))


def _pool_stats(message: cache_service_pb2.PoolStats) -> PoolStats:
    return _record(
        PoolStats,
        message,
        counters=_record(PoolCounters, message.counters),
        tenants=tuple(_record(TenantStats, tenant) for tenant in message.tenants),
        traffic=traffic.traffic_stats(message.traffic),
        engines=tuple(engine_stats(each) for each in message.engines),
        pins=tuple(pin_stats(each) for each in message.pins),
    )


def _record(kind: type[_Record], message: Any, **nested: Any) -> _Record:
    # The dataclasses have the fields of their messages; a test keeps them equal.
    names = [field.name for field in dataclasses.fields(kind) if field.name not in nested]
    return kind(**{name: getattr(message, name) for name in names}, **nested)
