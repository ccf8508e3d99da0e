"""Unary calls on sequences: Allocate, Extend, Commit, Fork, Handoff, Adopt, Release."""

from kvharbor.server.calls.gate import Callers, Context, Gate, answered
from kvharbor.server.calls.sequence_operations import SequenceOperations
from kvharbor.server.pools.pools import Pools
from kvharbor.server.pools.served_pool import OpenedPool
from kvharbor.server.sessions.session import Session
from kvharbor.v1 import cache_service_pb2 as pb
from kvharbor.v1 import cache_service_pb2_grpc as rpc


class SequenceCalls(rpc.CacheServiceServicer):
    """The calls of CacheService that work on the caller's sequences."""

    def __init__(self, gate: Gate, callers: Callers, pools: Pools, operations: SequenceOperations) -> None:
        self.gate = gate
        self._callers = callers
        self._pools = pools
        self._operations = operations

    @answered
    async def Allocate(self, request: pb.AllocateRequest, context: Context) -> pb.AllocateResponse:
        return await self._operations.allocate(*self._opened(context, request.pool_id), request)

    @answered
    async def Extend(self, request: pb.ExtendRequest, context: Context) -> pb.ExtendResponse:
        return await self._operations.extend(*self._opened(context, request.pool_id), request)

    @answered
    async def Commit(self, request: pb.CommitRequest, context: Context) -> pb.CommitResponse:
        return await self._operations.commit(*self._opened(context, request.pool_id), request)

    @answered
    async def Fork(self, request: pb.ForkRequest, context: Context) -> pb.ForkResponse:
        return await self._operations.fork(*self._opened(context, request.pool_id), request)

    @answered
    async def Handoff(self, request: pb.HandoffRequest, context: Context) -> pb.HandoffResponse:
        return await self._operations.handoff(*self._opened(context, request.pool_id), request)

    @answered
    async def Adopt(self, request: pb.AdoptRequest, context: Context) -> pb.AdoptResponse:
        return await self._operations.adopt(*self._opened(context, request.pool_id), request)

    @answered
    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        return await self._operations.release(*self._opened(context, request.pool_id), request)

    def _opened(self, context: Context, pool_id: str) -> tuple[Session, OpenedPool]:
        session = self._callers.session(context)
        return session, self._pools.opened(session, pool_id)
