"""The way into the synchronous client."""

import contextlib
import threading
import time
from typing import Self

from kvharbor.client import address, answers, calls, channel
from kvharbor.client.errors import Full, HarborError, PoolNotFound, SessionGone, Unavailable, WarmTaskNotFound
from kvharbor.client.link import Link
from kvharbor.client.memory import PoolMemory
from kvharbor.client.pool import Pool, PoolHandle
from kvharbor.client.results import PoolInfo, ServerInfo, ServiceStats, WarmTask
from kvharbor.client.sequence import Sequence
from kvharbor.client.sizes import size_bytes
from kvharbor.gpumem import Layout


def connect(
    target: address.Target = None,
    *,
    client_name: str = "",
    timeout_s: float = channel.DEFAULT_TIMEOUT_S,
    accepts_warm_tasks: bool = False,
) -> "Harbor":
    """Opens a session with the service at `target`, which lives until close or the end of this process.

    `target` is "unix:/path", a path (text with a "/", or a pathlib one) or "host:port"; None means the variable
    KVHARBOR_SOCKET, else /run/kvharbor/kvharbor.sock. Over TCP there is no session: lookup, stats and watch only.
    `client_name` is shown to people. `timeout_s` is the deadline of this call and the default one of every later
    call. `accepts_warm_tasks` has the service tell of prefixes to compute for operators: see
    Harbor.next_warm_task.

    Raises ServiceUnreachable at once when nobody listens there, or this process may not connect.
    """
    link = Link(
        address.parse(target), client_name=client_name, timeout_s=timeout_s, accepts_warm_tasks=accepts_warm_tasks
    )
    return Harbor(link)


class Harbor:
    """A connection with its session, and the pools that were opened on it. Threads may share it.

    It does not survive a fork: the child's copy of the session is closed, and its calls raise HarborClosed.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._pools: dict[str, Pool] = {}
        self._opening = threading.Lock()
        self._noticed: dict[str, None] = {}

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

    def open_pool(
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
        reply = self._link.run(calls.open_pool(name, layout, size_bytes(size)), timeout_s)
        pool_id = reply.descriptor.pool_id
        with self._opening:
            if pool_id not in self._pools:
                memory = PoolMemory.attach(side, pool_id)
                self._pools[pool_id] = Pool(self._link, name, memory, created=reply.created)
            return self._pools[pool_id]

    def find_pool(self, name: str) -> PoolHandle:
        """Returns an existing pool without its memory, or raises PoolNotFound."""
        for info in self.list_pools():
            if info.name == name:
                return PoolHandle(self._link, info.pool_id, name)
        raise answers.pool_not_found(name)

    def list_pools(self) -> list[PoolInfo]:
        """Returns the pools that the tenant may use, in order of name."""
        infos: list[PoolInfo] = []
        page_token = ""
        while True:
            page = self._link.run(calls.list_pools(page_token))
            infos.extend(answers.pool_info(pool) for pool in page.pools)
            page_token = page.next_page_token
            if not page_token:
                return infos

    def drop_pool(self, name: str) -> bool:
        """Removes a pool and its cached blocks; returns whether there was one.

        Raises PoolInUse while another session has it open, or a sequence or a pin exists. A Pool of it that
        was opened here must not be used any more.
        """
        try:
            handle = self.find_pool(name)
        except PoolNotFound:
            return False
        dropped = not self._link.run(calls.drop_pool(handle.id)).already_dropped
        with self._opening:
            pool = self._pools.pop(handle.id, None)
        if pool is not None:
            pool.memory.close()
        return dropped

    def stats(self, pool_name: str | None = None) -> ServiceStats:
        """Returns a consistent snapshot of each pool, or of the one of a name; raises PoolNotFound."""
        return answers.service_stats(self._link.run(calls.stats()), pool_name)

    def server_info(self) -> ServerInfo:
        """Returns the service's versions, life and memory."""
        return answers.server_info(self._link.run(calls.get_server_info()))

    def next_warm_task(self, timeout_s: float = 0.0) -> WarmTask[Pool, Sequence] | None:
        """Claims a prefix that an operator wants computed, of any pool opened here; None if none came in time.

        The sequence is this session's to compute, commit and release: see WarmTask. A task for which its pool
        has no room now is tried again until the time is over. Needs connect(..., accepts_warm_tasks=True).
        """
        channel.require_warm_tasks(self._link.session)
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._noticed.update(dict.fromkeys(self._link.require_session().take_notices()))
            task = self._claim_noticed()
            left_s = deadline_s - time.monotonic()
            if task is not None or left_s <= 0:
                return task
            wait_s = min(left_s, channel.ROOM_PAUSE_S) if self._noticed else left_s
            self._link.require_session().wait_for_notice(wait_s)

    def _claim_noticed(self) -> WarmTask[Pool, Sequence] | None:
        for pool_id in list(self._noticed):
            # The notice may be of a pool that another thread is just opening.
            with self._opening:
                pool = self._pools.get(pool_id)
            # Before the claim: a notice that comes during it is of another task.
            self._noticed.pop(pool_id, None)
            if pool is None:
                continue
            try:
                return pool.claim_warm_task()
            except WarmTaskNotFound:
                continue
            except Full:
                self._noticed[pool_id] = None
            except BaseException:
                self._noticed[pool_id] = None
                raise
        return None

    def close(self) -> None:
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
                    self._link.run(calls.close_session())
        finally:
            self._link.close()
            for pool in self._pools.values():
                pool.memory.close()
            self._pools.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *rest: object) -> None:
        try:
            self.close()
        except HarborError:
            # The error that ended the block says more than one that follows from it.
            if exc_type is None:
                raise
