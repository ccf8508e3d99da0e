"""Calls on pools, sessions and the service itself. They only translate."""

import base64
import binascii
import time

import structlog

from kvharbor.pool.errors import InvalidField
from kvharbor.server.errors import SessionUnknown
from kvharbor.server.gate import Callers, Context, Gate, answered
from kvharbor.server.pools import Pools
from kvharbor.server.served_pool import ServedPool
from kvharbor.server.sessions import Sessions
from kvharbor.server.side import API_VERSION
from kvharbor.server.wire import descriptor_message, duration_message, layout_of
from kvharbor.v1 import pool_service_pb2 as pb
from kvharbor.v1 import pool_service_pb2_grpc as rpc
from kvharbor.v1 import types_pb2

log = structlog.get_logger(__name__)

DEFAULT_PAGE_SIZE = 50
MAX_PAGE_SIZE = 200


class PoolCalls(rpc.PoolServiceServicer):
    """PoolService."""

    def __init__(
        self,
        gate: Gate,
        callers: Callers,
        pools: Pools,
        sessions: Sessions,
        *,
        server_version: str,
        max_message_bytes: int,
    ) -> None:
        self.gate = gate
        self._callers = callers
        self._pools = pools
        self._sessions = sessions
        self._server_version = server_version
        self._max_message_bytes = max_message_bytes
        self._started_at = time.monotonic()

    @answered
    async def GetServerInfo(
        self,
        request: pb.GetServerInfoRequest,  # noqa: ARG002 - the signature is gRPC's
        context: Context,  # noqa: ARG002
    ) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse(
            server_version=self._server_version,
            api_versions=[API_VERSION],
            epoch=self._pools.epoch,
            arena_kinds=["host"],
            memory_bytes=self._pools.memory_bytes,
            memory_available_bytes=self._pools.memory_available_bytes,
            max_message_bytes=self._max_message_bytes,
            uptime=duration_message(time.monotonic() - self._started_at),
        )

    @answered
    async def OpenPool(self, request: pb.OpenPoolRequest, context: Context) -> pb.OpenPoolResponse:
        session = self._callers.session(context)
        layout = layout_of(request.layout)
        served, created = await self._pools.open(session, request.name, layout, request.size_bytes)
        log.info("pool opened", pool=served.pool_id, session=session.number, created=created)
        return pb.OpenPoolResponse(descriptor=self.describe(served), created=created)

    @answered
    async def DescribePool(self, request: pb.DescribePoolRequest, context: Context) -> pb.DescribePoolResponse:
        served = self._pools.visible(self._callers.peer(context), request.pool_id)
        return pb.DescribePoolResponse(descriptor=self.describe(served))

    @answered
    async def ListPools(self, request: pb.ListPoolsRequest, context: Context) -> pb.ListPoolsResponse:
        if request.page_size < 0:
            raise InvalidField(
                field="page_size", value=request.page_size, limit="0 or more", remedy="0 means the default"
            )
        after = _page_start(request.page_token)
        page_size = min(request.page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
        seen = self._pools.all_visible(self._callers.peer(context))
        rest = [served for served in seen if after is None or (served.name, served.tenant) > after]
        page = rest[:page_size]
        return pb.ListPoolsResponse(
            pools=[self.describe(served) for served in page],
            next_page_token=_page_token(page[-1]) if len(rest) > page_size else "",
        )

    @answered
    async def DropPool(self, request: pb.DropPoolRequest, context: Context) -> pb.DropPoolResponse:
        session = self._callers.session(context)
        return pb.DropPoolResponse(already_dropped=not await self._pools.drop(session, request.pool_id))

    @answered
    async def CloseSession(
        self,
        request: pb.CloseSessionRequest,  # noqa: ARG002 - the signature is gRPC's
        context: Context,
    ) -> pb.CloseSessionResponse:
        token = self._callers.token(context)
        try:
            session = self._sessions.of(token)
        except SessionUnknown:
            # Closed before: the answer to that call may have been lost.
            return pb.CloseSessionResponse()
        released_count = await self._sessions.end(session, cause="closed by the client")
        return pb.CloseSessionResponse(released_sequence_count=released_count)

    def describe(self, served: ServedPool) -> types_pb2.PoolDescriptor:
        """Returns a pool's descriptor as a message."""
        return descriptor_message(served.descriptor, pool_id=served.pool_id, name=served.name, epoch=self._pools.epoch)


def _page_token(last: ServedPool) -> str:
    return base64.urlsafe_b64encode(f"{last.name}\0{last.tenant}".encode()).decode()


def _page_start(token: str) -> tuple[str, str] | None:
    if not token:
        return None
    try:
        name, separator, tenant = base64.urlsafe_b64decode(token.encode()).decode().partition("\0")
    except (binascii.Error, UnicodeError):
        separator = ""
    if not separator:
        raise InvalidField(
            field="page_token",
            value=repr(token[:40]),
            limit="a next_page_token of this call",
            remedy="begin with an empty one",
        )
    return name, tenant
