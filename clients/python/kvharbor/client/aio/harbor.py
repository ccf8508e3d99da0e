"""The way into the asyncio client."""

import asyncio
import contextlib
import time
from typing import Self

from kvharbor.client import address, answers, calls, channel
from kvharbor.client.aio.connecting import Connecting
from kvharbor.client.aio.link import Link
from kvharbor.client.aio.pool import Pool, PoolHandle
from kvharbor.client.aio.sequence import Sequence
from kvharbor.client.errors import Full, HarborError, PoolNotFound, SessionGone, Unavailable, WarmTaskNotFound
from kvharbor.client.memory import PoolMemory
from kvharbor.client.results import PoolInfo, ServerInfo, ServiceStats, WarmTask
from kvharbor.client.sizes import size_bytes
from kvharbor.gpumem import Layout


def connect(
    target: address.Target = None,
    *,
    client_name: str = "",
    timeout_s: float = channel.DEFAULT_TIMEOUT_S,
    accepts_warm_tasks: bool = False,
) -> "Connecting[Harbor]":
    """Opens a session with the service at `target`, which lives until close or the end of this process.

    `await` it for a Harbor to close, or `async with` it for one that is closed at the end of the block.

    `target` is "unix:/path", a path (text with a "/", or a pathlib one) or "host:port"; None means the variable
    KVHARBOR_SOCKET, else /run/kvharbor/kvharbor.sock. Over TCP there is no session: lookup, stats and watch only.
    `client_name` is shown to people. `timeout_s` is the deadline of this call and the default one of every later
    call. `accepts_warm_tasks` has the service tell of prefixes to compute for operators: see
    Harbor.next_warm_task.

    Raises ServiceUnreachable at once when nobody listens there, or this process may not connect.
    """

    async def opened() -> Harbor:
        place = address.parse(target)
        link = await Link.open(
            place, client_name=client_name, timeout_s=timeout_s, accepts_warm_tasks=accepts_warm_tasks
        )
        return Harbor(link)

    return Connecting(opened())


class Harbor:
    """A connection with its session, and the pools that were opened on it. Tasks of its event loop share it.

    It does not survive a fork: the child's copy of the session is closed, and its calls raise HarborClosed.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._pools: dict[str, Pool] = {}
        self._opening = asyncio.Lock()
        self._noticed: dict[str, None] = {}
        self._waiting = asyncio.Lock()

    @property
    def session_id(self) -> str:
        """The session's name in stats and logs; empty over TCP."""
        return self._link.session.session_id if self._link.session else ""

    @property
    def tenant(self) -> str:
        """Whom the service takes this process for; empty over TCP."""
        return self._link.session.tenant if self._link.session else ""

    @property
    def epoch(self) -> str:
        """The life of the service's state that this session belongs to; empty over TCP."""
        return self._link.session.epoch if self._link.session else ""

    async def open_pool(
        self,
        name: str,
        layout: Layout,
        size: str | int | None = None,
        *,
        timeout_s: float = channel.OPEN_POOL_TIMEOUT_S,
    ) -> Pool:
        """Finds the pool of this name or makes it, and maps its memory; a second call returns the same Pool.

        `size` is in bytes or text such as "1GiB"; None: what is left of the service's memory. Raises
        LayoutMismatch or PoolSizeMismatch when it exists with another one, InsufficientMemory.
        """
        side = self._link.require_session()
        reply = await self._link.run(calls.open_pool(name, layout, size_bytes(size)), timeout_s)
        pool_id = reply.descriptor.pool_id
        async with self._opening:
            if pool_id not in self._pools:
                memory = await asyncio.to_thread(PoolMemory.attach, side, pool_id)
                self._pools[pool_id] = Pool(self._link, name, memory, created=reply.created)
            return self._pools[pool_id]

    async def find_pool(self, name: str) -> PoolHandle:
        """Returns an existing pool without its memory, or raises PoolNotFound."""
        for info in await self.list_pools():
            if info.name == name:
                return PoolHandle(self._link, info.pool_id, name)
        raise answers.pool_not_found(name)

    async def list_pools(self) -> list[PoolInfo]:
        """Returns the pools that the tenant may use, in order of name."""
        infos: list[PoolInfo] = []
        page_token = ""
        while True:
            page = await self._link.run(calls.list_pools(page_token))
            infos.extend(answers.pool_info(pool) for pool in page.pools)
            page_token = page.next_page_token
            if not page_token:
                return infos

    async def drop_pool(self, name: str) -> bool:
        """Removes a pool and its cached blocks; returns whether there was one.

        Raises PoolInUse while another session has it open, or a sequence or a pin exists. A Pool of it that
        was opened here must not be used any more.
        """
        try:
            handle = await self.find_pool(name)
        except PoolNotFound:
            return False
        dropped = not (await self._link.run(calls.drop_pool(handle.id))).already_dropped
        async with self._opening:
            pool = self._pools.pop(handle.id, None)
        if pool is not None:
            pool.memory.close()
        return dropped

    async def stats(self, pool_name: str | None = None) -> ServiceStats:
        """Returns a consistent snapshot of each pool, or of the one of a name; raises PoolNotFound."""
        return answers.service_stats(await self._link.run(calls.stats()), pool_name)

    async def server_info(self) -> ServerInfo:
        """Returns the service's versions, life and memory."""
        return answers.server_info(await self._link.run(calls.get_server_info()))

    async def next_warm_task(self, timeout_s: float = 0.0) -> WarmTask[Pool, Sequence] | None:
        """Claims a prefix that an operator wants computed, of any pool opened here; None if none came in time.

        The sequence is this session's to compute, commit and release: see WarmTask. A task for which its pool
        has no room now is tried again until the time is over. Needs connect(..., accepts_warm_tasks=True).
        """
        channel.require_warm_tasks(self._link.session)
        deadline_s = time.monotonic() + timeout_s
        while True:
            await self._take_notices()
            task = await self._claim_noticed()
            left_s = deadline_s - time.monotonic()
            if task is not None or left_s <= 0:
                return task
            wait_s = min(left_s, channel.ROOM_PAUSE_S) if self._noticed else left_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s), self._waiting:
                    await self._link.wait_for_notice()

    async def _take_notices(self) -> None:
        taking = asyncio.ensure_future(asyncio.to_thread(self._link.require_session().take_notices))
        # What the thread has taken counts, even if this task is cancelled meanwhile.
        taking.add_done_callback(self._note)
        await asyncio.shield(taking)

    def _note(self, taking: "asyncio.Future[list[str]]") -> None:
        if not taking.cancelled() and taking.exception() is None:
            self._noticed.update(dict.fromkeys(taking.result()))

    async def _claim_noticed(self) -> WarmTask[Pool, Sequence] | None:
        for pool_id in list(self._noticed):
            # The notice may be of a pool that another task is just opening.
            async with self._opening:
                pool = self._pools.get(pool_id)
            # Before the claim: a notice that comes during it is of another task.
            self._noticed.pop(pool_id, None)
            if pool is None:
                continue
            try:
                return await pool.claim_warm_task()
            except WarmTaskNotFound:
                continue
            except Full:
                self._noticed[pool_id] = None
            except BaseException:
                self._noticed[pool_id] = None
                raise
        return None

    async def close(self) -> None:
        """Ends the session, its sequences and its mappings. Repeating it does nothing.

        Asserts that nothing of this process touches a block any more and all device work is done: the blocks
        are free at once. Arrays over the pool keep its memory mapped while they live, but it is no longer
        theirs [C6].
        """
        if self._link.closed:
            return
        try:
            if self._link.side is not None:
                # Gone or out of reach: the end of the side socket ends the session all the same.
                with contextlib.suppress(SessionGone, Unavailable):
                    await self._link.run(calls.close_session())
        finally:
            await self._link.close()
            for pool in self._pools.values():
                pool.memory.close()
            self._pools.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, *rest: object) -> None:
        try:
            await self.close()
        except HarborError:
            # The error that ended the block says more than one that follows from it.
            if exc_type is None:
                raise
