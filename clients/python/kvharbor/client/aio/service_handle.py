"""What tools and operators ask of the service, with asyncio: about its pools, its sessions and itself."""

from kvharbor.client import answers, calls, channel
from kvharbor.client.aio.link import Link
from kvharbor.client.aio.pool import PoolHandle
from kvharbor.client.pool_names import pool_named
from kvharbor.client.results import PoolInfo, ServiceStats, Upgrade
from kvharbor.client.server_info import ServerInfo, server_info
from kvharbor.client.sessions import SessionInfo, session_info
from kvharbor.v1 import pool_service_pb2 as pools


class ServiceHandle:
    """The service without the memory of its pools. Tasks may share it."""

    def __init__(self, link: Link) -> None:
        self._link = link

    @property
    def tenant(self) -> str:
        """Whom the service takes this process for; empty over TCP."""
        return self._link.session.tenant if self._link.session else ""

    async def find_pool(self, name: str, tenant: str | None = None) -> PoolHandle:
        """Returns an existing pool without its memory.

        An administrator sees the pools of all tenants: a name means the one of `tenant`, if given, else the own
        tenant's, else the only one there is. Raises PoolNotFound, PoolAmbiguous.
        """
        info = pool_named(name, await self.list_pools(), tenant=tenant, own_tenant=self.tenant)
        return PoolHandle(self._link, info.pool_id, name, info.tenant)

    async def list_pools(self) -> list[PoolInfo]:
        """Returns the pools that the tenant may use, an administrator's all tenants', in order of name."""
        infos: list[PoolInfo] = []
        page_token = ""
        while True:
            page: pools.ListPoolsResponse = await self._link.run(calls.list_pools(page_token))
            infos.extend(answers.pool_info(pool) for pool in page.pools)
            page_token = page.next_page_token
            if not page_token:
                return infos

    async def stats(self, pool_name: str | None = None, tenant: str | None = None) -> ServiceStats:
        """Returns a consistent snapshot of each pool, or of those of a name or a tenant.

        Raises PoolNotFound where none has that name.
        """
        return answers.service_stats(await self._link.run(calls.stats()), pool_name, tenant)

    async def server_info(self) -> ServerInfo:
        """Returns the service's versions, life and memory."""
        return server_info(await self._link.run(calls.get_server_info()))

    async def list_sessions(self) -> list[SessionInfo]:
        """Returns all sessions, the ended ones too whose processes may not be gone; raises AdminRequired."""
        sessions: list[SessionInfo] = []
        page_token = ""
        while True:
            page: pools.ListSessionsResponse = await self._link.run(calls.list_sessions(page_token))
            sessions.extend(session_info(each) for each in page.sessions)
            page_token = page.next_page_token
            if not page_token:
                return sessions

    async def kill_session(self, session_id: str) -> int:
        """Kills every process of a session with SIGKILL; returns how many. Raises SessionNotFound, AdminRequired."""
        reply: pools.KillSessionResponse = await self._link.run(calls.kill_session(session_id))
        return reply.killed_process_count

    async def upgrade(self, *, timeout_s: float = channel.UPGRADE_TIMEOUT_S) -> Upgrade:
        """Has the service's process replaced, once another has started; returns which one that is.

        The process ends after this, and sessions go on in the next one, whose restart_count is greater. Raises
        UpgradeFailed where the other does not start: this one goes on then. Raises AdminRequired.
        """
        reply: pools.UpgradeResponse = await self._link.run(calls.upgrade(), timeout_s)
        return Upgrade(reply.epoch, reply.restart_count)
