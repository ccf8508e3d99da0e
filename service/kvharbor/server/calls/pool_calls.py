"""Calls on pools and the service itself. They only translate."""

import base64
import binascii
import time
from collections.abc import Awaitable, Callable, Iterable

import structlog

from kvharbor.gpumem import ArenaKind
from kvharbor.pool.errors import InvalidField
from kvharbor.server.calls.gate import Callers, Context, Gate, answered
from kvharbor.server.calls.pages import page_size_of
from kvharbor.server.calls.session_calls import SessionCalls
from kvharbor.server.descriptors import needing_descriptors
from kvharbor.server.messages.layouts import descriptor_message, layout_of
from kvharbor.server.messages.wire import duration_message
from kvharbor.server.pools.life import KeptSetting, Life
from kvharbor.server.pools.pools import Pools
from kvharbor.server.pools.served_pool import ServedPool
from kvharbor.server.sessions.sessions import Sessions
from kvharbor.server.side.greeting import API_VERSION
from kvharbor.v1 import pool_service_pb2 as pb
from kvharbor.v1 import types_pb2

log = structlog.get_logger(__name__)


class PoolCalls(SessionCalls):
    """PoolService."""

    def __init__(
        self,
        gate: Gate,
        callers: Callers,
        pools: Pools,
        sessions: Sessions,
        life: Life,
        upgrade: Callable[[], Awaitable[None]],
        *,
        kept_settings: Iterable[KeptSetting],
        server_version: str,
        max_message_bytes: int,
    ) -> None:
        super().__init__(gate, callers, sessions)
        self._pools = pools
        self._life = life
        self._upgrade = upgrade
        self._kept_settings = [
            pb.KeptSetting(name=each.name, in_force=each.in_force, wanted=each.wanted) for each in kept_settings
        ]
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
            arena_kinds=[self._life.arena],
            memory_bytes=self._pools.budget.memory_bytes,
            memory_available_bytes=self._pools.budget.available_bytes,
            max_message_bytes=self._max_message_bytes,
            uptime=duration_message(time.monotonic() - self._started_at),
            restart_count=self._life.restart_count,
            stall_count=self._life.stall_count,
            stall_time=duration_message(self._life.stalled_s),
            devices=[
                pb.Device(
                    uuid=uuid,
                    name=share["name"],
                    memory_bytes=share["memory_bytes"],
                    memory_available_bytes=self._pools.budget.available_in(uuid),
                )
                for uuid, share in self._life.devices.items()
            ],
            kept_settings=self._kept_settings,
        )

    @answered
    async def OpenPool(self, request: pb.OpenPoolRequest, context: Context) -> pb.OpenPoolResponse:
        session = self._callers.session(context)
        layout = layout_of(request.layout)
        with needing_descriptors():
            served, created = await self._pools.open(
                session, request.name, layout, request.size_bytes, tuple(request.devices)
            )
        # Before the answer: the next process must know that the session may hold blocks there [S15].
        self._sessions.keep(session)
        log.info("pool opened", pool=served.pool_id, session=session.number, created=created)
        return pb.OpenPoolResponse(pool=self.describe(served), created=created)

    @answered
    async def DescribePool(self, request: pb.DescribePoolRequest, context: Context) -> pb.DescribePoolResponse:
        served = self._pools.visible(self._callers.peer(context), request.pool_id)
        return pb.DescribePoolResponse(pool=self.describe(served))

    @answered
    async def ListPools(self, request: pb.ListPoolsRequest, context: Context) -> pb.ListPoolsResponse:
        page_size = page_size_of(request.page_size)
        after = _page_start(request.page_token)
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
        was_dropped = await self._pools.drop(session, request.pool_id)
        self._sessions.keep(session)
        return pb.DropPoolResponse(already_dropped=not was_dropped)

    @answered
    async def Upgrade(
        self,
        request: pb.UpgradeRequest,  # noqa: ARG002 - the signature is gRPC's
        context: Context,
    ) -> pb.UpgradeResponse:
        self._callers.administrator(context)
        await self._upgrade()
        return pb.UpgradeResponse(epoch=self._life.epoch, restart_count=self._life.restart_count)

    def describe(self, served: ServedPool) -> types_pb2.PoolDescriptor:
        """Returns a pool's descriptor as a message."""
        names = {
            "pool_id": served.pool_id,
            "name": served.name,
            "tenant": served.tenant,
            "epoch": self._pools.epoch,
        }
        return descriptor_message(served.descriptor, ArenaKind(self._life.arena), served.places, **names)


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
