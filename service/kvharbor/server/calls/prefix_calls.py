"""Calls on prefixes and on what a pool holds: Warmup, ClaimWarmTask, Unwarm, Lookup, Evict, Stats.

They only translate.
"""

import dataclasses

from kvharbor.pool import PinStats, PoolStats, Presence
from kvharbor.pool.errors import InvalidField
from kvharbor.server.calls.gate import Callers, Context, Gate, answered
from kvharbor.server.calls.sequence_operations import expire_time
from kvharbor.server.calls.withdrawal import Withdrawal
from kvharbor.server.errors import PoolNotFound
from kvharbor.server.messages.engines import engine_stats_message
from kvharbor.server.messages.traffic import miss_message, traffic_message
from kvharbor.server.messages.wire import duration_message, prompt_of, seconds_of, sequence_message
from kvharbor.server.pools.pools import Pools
from kvharbor.server.pools.served_pool import OpenedPool, ServedPool
from kvharbor.server.pools.warm_desk import PinRequest
from kvharbor.server.session_errors import ResumeRequired, SessionRequired
from kvharbor.server.sessions.peer import Peer
from kvharbor.server.sessions.sessions import Sessions
from kvharbor.v1 import cache_service_pb2 as pb
from kvharbor.v1 import cache_service_pb2_grpc as rpc
from kvharbor.v1 import types_pb2

LEAST_TTL_S = 0.001
MAX_PINS = 64
"""Of one pool in Stats."""


class PrefixCalls(rpc.CacheServiceServicer):
    """The calls of CacheService that need no sequence."""

    def __init__(self, gate: Gate, callers: Callers, pools: Pools, sessions: Sessions) -> None:
        self.gate = gate
        self._callers = callers
        self._pools = pools
        self._sessions = sessions

    @answered
    async def Warmup(self, request: pb.WarmupRequest, context: Context) -> pb.WarmupResponse:
        session = self._callers.session(context)
        served = self._pools.visible(session.peer, request.pool_id)
        ttl_s = seconds_of("ttl", request.ttl, least_s=LEAST_TTL_S) if request.HasField("ttl") else None
        expires_at = None if ttl_s is None else served.owner.clock() + ttl_s
        opened = session.opened.get(served.pool_id)
        asked = PinRequest(prompt_of(request, _version(opened)), request.name, expires_at)
        response = pb.WarmupResponse(accepting_session_count=served.warm.accepting_session_count)
        if request.fill == pb.WARMUP_FILL_ENGINE:
            wait_s = seconds_of("wait", request.wait) if request.HasField("wait") else 0.0
            ordered = await served.warm.by_engine(asked, wait_s)
            response.pinned_tokens, response.missing_tokens = ordered.pinned_tokens, ordered.missing_tokens
            response.task_pending = ordered.task_pending
        else:
            filler = _filler(request, opened)
            if filler is None:
                warmed = await served.warm.by_nobody(asked)
            elif not filler.resumed:
                raise ResumeRequired(served.pool_id)
            else:
                warmed = await served.warm.by_caller(session, filler.turns, asked)
                if warmed.sequence is not None:
                    response.sequence.CopyFrom(sequence_message(warmed.sequence, filler.handle_prefix))
            response.pinned_tokens, response.missing_tokens = warmed.pinned_tokens, warmed.missing_tokens
        if ttl_s is not None:
            response.expire_time.CopyFrom(expire_time(ttl_s))
            response.ttl.CopyFrom(duration_message(ttl_s))
        return response

    @answered
    async def ClaimWarmTask(self, request: pb.ClaimWarmTaskRequest, context: Context) -> pb.ClaimWarmTaskResponse:
        session = self._callers.session(context)
        opened = self._pools.opened(session, request.pool_id)
        with Withdrawal(session, opened, request.request_id) as withdrawal:
            claimed = await opened.served.warm.claim(session, opened.turns, request.request_id, granted=withdrawal.note)
        prompt, view = claimed.asked.prompt, claimed.sequence
        response = pb.ClaimWarmTaskResponse(
            name=claimed.asked.name,
            token_ids=prompt.token_ids[: 4 * view.token_count],
            extra_keys=[
                types_pb2.ExtraKey(token_offset=key.token_offset, value=key.value)
                for key in prompt.extra_keys
                if key.token_offset < view.token_count
            ],
            namespace=types_pb2.NamespaceKey(version=prompt.version, adapter=prompt.adapter, salt=prompt.salt),
            sequence=sequence_message(view, opened.handle_prefix),
        )
        if claimed.asked.expires_at is not None:
            ttl_s = max(claimed.asked.expires_at - opened.served.owner.clock(), 0.0)
            response.expire_time.CopyFrom(expire_time(ttl_s))
            response.ttl.CopyFrom(duration_message(ttl_s))
        return response

    @answered
    async def Unwarm(self, request: pb.UnwarmRequest, context: Context) -> pb.UnwarmResponse:
        served = self._pools.visible(self._callers.session(context).peer, request.pool_id)
        await served.warm.unwarm(request.name)
        return pb.UnwarmResponse()

    @answered
    async def Lookup(self, request: pb.LookupRequest, context: Context) -> pb.LookupResponse:
        served = self._pools.visible(self._callers.peer(context), request.pool_id)
        session = self._callers.session_or_none(context)
        opened = None if session is None else session.opened.get(served.pool_id)
        prompt = prompt_of(request, _version(opened))
        most = request.max_cached_tokens if request.HasField("max_cached_tokens") else None
        presence: Presence = await served.owner.run_unbound(lambda: served.pool.lookup(served.tenant, prompt, most))
        return pb.LookupResponse(
            present_tokens=presence.present_tokens,
            cached_tokens=presence.cached_tokens,
            miss=miss_message(presence.miss),
        )

    @answered
    async def Evict(self, request: pb.EvictRequest, context: Context) -> pb.EvictResponse:
        peer = self._callers.administrator(context)
        served = self._pools.visible(peer, request.pool_id)
        target = request.WhichOneof("target")
        block = request.block
        if target == "block":
            evicted_count = await served.owner.run_unbound(
                lambda: served.pool.evict_block(block.block_id, block.generation)
            )
        elif target == "all_unheld" and request.all_unheld:
            evicted_count = await served.owner.run_unbound(served.pool.evict_unheld)
        else:
            raise InvalidField(
                field="target",
                value=target or "empty",
                limit="block, or all_unheld with the value true",
                remedy="name what to remove",
            )
        return pb.EvictResponse(evicted_block_count=evicted_count)

    @answered
    async def Stats(self, request: pb.StatsRequest, context: Context) -> pb.StatsResponse:
        response = pb.StatsResponse(session_count=len(self._sessions))
        try:
            peer = self._callers.peer(context)
        except SessionRequired:
            # A caller that nobody vouches for learns that the service lives, and of nobody's pools.
            if request.pool_id:
                raise
            return response
        pools = self._pools
        chosen = [pools.visible(peer, request.pool_id)] if request.pool_id else pools.all_visible(peer)
        response.pools.extend(_pool_stats(served, peer) for served in chosen)
        return response


def _version(opened: OpenedPool | None) -> str:
    """Returns the version that a request means which names none."""
    return "" if opened is None else opened.version


def _filler(request: pb.WarmupRequest, opened: OpenedPool | None) -> OpenedPool | None:
    """Returns the caller's pool if the caller is to compute what is missing; None if nobody is."""
    if request.HasField("wait"):
        raise InvalidField(
            field="wait",
            value="set",
            limit="unset without WARMUP_FILL_ENGINE",
            remedy="leave it out: nobody else fills",
        )
    if request.fill == pb.WARMUP_FILL_NOBODY:
        return None
    if request.fill == pb.WARMUP_FILL_UNSPECIFIED:
        return opened
    if request.fill != pb.WARMUP_FILL_CALLER:
        raise InvalidField(
            field="fill", value=request.fill, limit="a value of WarmupFill", remedy="set it, or update the service"
        )
    if opened is None:
        raise PoolNotFound(request.pool_id)
    return opened


def _pool_stats(served: ServedPool, peer: Peer) -> pb.PoolStats:
    stats: PoolStats = served.pool.stats()
    warm_waiting_count, warm_filling_count = served.warm.task_counts
    return pb.PoolStats(
        pool_id=served.pool_id,
        name=served.name,
        tenant=served.tenant,
        revision=stats.revision,
        total_block_count=stats.total_block_count,
        scratch_block_count=stats.scratch_block_count,
        free_block_count=stats.free_block_count,
        reserved_block_count=stats.reserved_block_count,
        active_block_count=stats.active_block_count,
        cached_block_count=stats.cached_block_count,
        warm_block_count=stats.warm_block_count,
        quarantined_block_count=stats.quarantined_block_count,
        shared_block_count=stats.shared_block_count,
        block_bytes=served.block_bytes,
        used_bytes=(stats.total_block_count - stats.free_block_count) * served.block_bytes,
        total_bytes=stats.total_block_count * served.block_bytes,
        sequence_count=stats.sequence_count,
        pin_count=stats.pin_count,
        warm_budget_used_block_count=stats.warm_budget_used_block_count,
        warm_budget_block_count=stats.warm_budget_block_count,
        waiting_count=served.admission.waiting_count,
        pending_waiting_count=served.admission.single_flight.waiting_count,
        counters=pb.PoolCounters(**dataclasses.asdict(stats.counters)),
        tenants=[
            pb.TenantStats(**dataclasses.asdict(tenant))
            for tenant in stats.tenants
            if peer.administrator or tenant.tenant == peer.tenant
        ],
        warm_task_waiting_count=warm_waiting_count,
        warm_task_filling_count=warm_filling_count,
        traffic=traffic_message(stats.traffic, served.pool.config.block_tokens),
        engines=[engine_stats_message(engine) for engine in stats.engines],
        pins=[_pin_stats(pin, served.owner.clock()) for pin in served.pins_for(peer, MAX_PINS)],
    )


def _pin_stats(pin: PinStats, now: float) -> pb.PinStats:
    return pb.PinStats(
        name=pin.name,
        tenant=pin.tenant,
        pinned_tokens=pin.pinned_tokens,
        missing_tokens=pin.missing_tokens,
        filling=pin.filling,
        ttl=None if pin.expires_at is None else duration_message(max(pin.expires_at - now, 0.0)),
    )
