"""Calls on prefixes and on what a pool holds: Warmup, Unwarm, Lookup, Evict, Stats. They only translate."""

import dataclasses

from kvharbor.pool import PoolStats, Presence, Warmed
from kvharbor.pool.errors import InvalidField
from kvharbor.pool.steps import Steps
from kvharbor.server.errors import AdminRequired, SessionRequired
from kvharbor.server.gate import Callers, Context, Gate, answered
from kvharbor.server.pools import Pools
from kvharbor.server.sequence_calls import expire_time
from kvharbor.server.served_pool import ServedPool
from kvharbor.server.sessions import Peer, Sessions
from kvharbor.server.turns import Turns
from kvharbor.server.wire import duration_message, prompt_of, seconds_of, sequence_message
from kvharbor.v1 import cache_service_pb2 as pb
from kvharbor.v1 import cache_service_pb2_grpc as rpc

LEAST_TTL_S = 0.001


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
        prompt = prompt_of(request)
        # A session that has not opened the pool cannot compute into it: it pins what is there.
        opened = session.opened.get(served.pool_id)
        owner, number = served.owner, session.number if opened is not None else None

        def start() -> Steps[Warmed]:
            return owner.pool.warmup(
                served.tenant,
                number,
                prompt,
                request.name,
                expires_at=None if ttl_s is None else owner.clock() + ttl_s,
                present_only=request.present_only,
            )

        warmed = await owner.run(Turns() if opened is None else opened.turns, start)
        owner.reschedule()
        response = pb.WarmupResponse(pinned_tokens=warmed.pinned_tokens, missing_tokens=warmed.missing_tokens)
        if warmed.sequence is not None and opened is not None:
            response.sequence.CopyFrom(sequence_message(warmed.sequence, opened.handle_prefix))
        if ttl_s is not None:
            response.expire_time.CopyFrom(expire_time(ttl_s))
            response.ttl.CopyFrom(duration_message(ttl_s))
        return response

    @answered
    async def Unwarm(self, request: pb.UnwarmRequest, context: Context) -> pb.UnwarmResponse:
        served = self._pools.visible(self._callers.session(context).peer, request.pool_id)
        await served.owner.run_unbound(lambda: served.pool.unwarm(served.tenant, request.name))
        served.owner.reschedule()
        return pb.UnwarmResponse()

    @answered
    async def Lookup(self, request: pb.LookupRequest, context: Context) -> pb.LookupResponse:
        served = self._pools.visible(self._callers.peer(context), request.pool_id)
        prompt = prompt_of(request)
        most = request.max_cached_tokens if request.HasField("max_cached_tokens") else None
        presence: Presence = await served.owner.run_unbound(lambda: served.pool.lookup(served.tenant, prompt, most))
        return pb.LookupResponse(present_tokens=presence.present_tokens, cached_tokens=presence.cached_tokens)

    @answered
    async def Evict(self, request: pb.EvictRequest, context: Context) -> pb.EvictResponse:
        peer = self._callers.session(context).peer
        if not peer.administrator:
            raise AdminRequired(peer.uid)
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


def _pool_stats(served: ServedPool, peer: Peer) -> pb.PoolStats:
    stats: PoolStats = served.pool.stats()
    block_bytes = served.descriptor.layout.block_bytes
    return pb.PoolStats(
        pool_id=served.pool_id,
        name=served.name,
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
        block_bytes=block_bytes,
        used_bytes=(stats.total_block_count - stats.free_block_count) * block_bytes,
        total_bytes=stats.total_block_count * block_bytes,
        sequence_count=stats.sequence_count,
        pin_count=stats.pin_count,
        warm_budget_used_block_count=stats.warm_budget_used_block_count,
        warm_budget_block_count=stats.warm_budget_block_count,
        waiting_count=served.admission.waiting_count,
        counters=pb.PoolCounters(**dataclasses.asdict(stats.counters)),
        tenants=[
            pb.TenantStats(**dataclasses.asdict(tenant))
            for tenant in stats.tenants
            if peer.administrator or tenant.tenant == peer.tenant
        ],
    )
