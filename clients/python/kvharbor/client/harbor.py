"""The way into the synchronous client."""

import contextlib
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any, Self

from kvharbor.client import address, answers, calls, channel, ordering
from kvharbor.client.errors import (
    EpochEnded,
    Full,
    PoolNotFound,
    SessionGone,
    Unavailable,
    WarmTaskNotFound,
)
from kvharbor.client.link import Link
from kvharbor.client.memory import PoolMemory, checked_part, require_part
from kvharbor.client.options import Options
from kvharbor.client.ordering import StreamOrder
from kvharbor.client.pool import Pool, PoolHandle
from kvharbor.client.results import PoolInfo, ServerInfo, ServiceStats, Upgrade, WarmTask
from kvharbor.client.sequence import Sequence
from kvharbor.client.sessions import SessionInfo, session_info
from kvharbor.client.side import SideSocket
from kvharbor.client.sizes import size_bytes
from kvharbor.gpumem import Layout
from kvharbor.v1 import pool_service_pb2 as pools


def connect(
    target: address.Target = None,
    *,
    client_name: str = "",
    timeout_s: float = 10.0,
    accepts_warm_tasks: bool = False,
    away_wait_s: float | None = None,
    on_epoch: Callable[[str, str], Any] | None = None,
    on_moved: Callable[["Pool"], Any] | None = None,
    join: str = "",
    rank: int = 0,
    read_only: bool = False,
) -> "Harbor":
    """Opens a session with the service at `target`, which lives until close or the end of this process.

    `target` is "unix:/path", a path (text with a "/", or a pathlib one) or "host:port"; None means the variable
    KVHARBOR_SOCKET, else /run/kvharbor/kvharbor.sock. Over TCP there is no session: lookup, stats and watch only.
    `client_name` is shown to people. `timeout_s` is the deadline of this call and the default one of every later
    call. `accepts_warm_tasks` has the service tell of prefixes to compute for operators: see
    Harbor.next_warm_task.

    When the service's process ends, the harbor goes on with the next one [C11]; calls that need it wait for that,
    up to their timeout and to `away_wait_s`, if given (0: not at all). `on_epoch(old, new)` is called in a
    thread of its own when the service has lost its state. It returns
    when nothing is at work on the pools' memory any more; the harbor then opens them anew, in their place [C12].
    Without it such an end is the end of the harbor. `on_moved(pool)` is called in the same way before the first call on
    a pool whose memory has other addresses now: what was taken from its views before is void [C15].

    `join` makes this process a member of the session whose leader's `Harbor.join_token` it is, under a `rank` of
    its own from 1 on: it maps what the leader has opened, `read_only` or not, and makes no calls [C13].

    Raises ServiceUnreachable at once when nobody listens there, or this process may not connect.
    """
    options = Options(
        client_name=client_name,
        timeout_s=timeout_s,
        accepts_warm_tasks=accepts_warm_tasks,
        away_wait_s=away_wait_s,
        on_epoch=on_epoch,
        on_moved=on_moved,
        join=join,
        rank=rank,
        read_only=read_only,
    )
    return Harbor(Link(address.parse(target), options))


class Harbor:
    """A connection with its session, and the pools that were opened on it. Threads may share it.

    It does not survive a fork: the child's copy of the session is closed, and its calls raise HarborClosed.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._pools = link.pools
        self._attached: list[PoolMemory] = []
        self._opening = threading.Lock()
        self._noticed: dict[str, None] = {}

    @property
    def session_id(self) -> str:
        """The session's name in stats and logs; empty over TCP."""
        return self._link.session.session_id if self._link.session else ""

    @property
    def join_token(self) -> str:
        """The secret for `connect(join=...)` in the engine's other processes; empty for these and over TCP."""
        return self._link.session.join_token if self._link.session else ""

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
        devices: Items[str] = (),
        part: int = 0,
        order: StreamOrder | None = None,
        timeout_s: float = channel.OPEN_POOL_TIMEOUT_S,
    ) -> Pool:
        """Finds the pool of this name or makes it, and maps its memory; a second call returns the same Pool.

        `size` is in bytes or text such as "1GiB"; None: what is left of the service's memory. A pool has as many parts
        of that size as the layout's tp_size: on `devices` (UUIDs, by rank), or where the service likes. This
        process maps the one of its rank, `part`; the engine's others join the session for theirs.

        On a device, commits and releases wait for torch's current stream if torch uses CUDA in this process, else for
        all of its work on the device; `order` says what to wait for instead, from then on [C14].

        Raises LayoutMismatch, PoolSizeMismatch or PoolDevicesMismatch when it exists with another one,
        InsufficientMemory, DeviceNotVisible, MpsClientRefused, and StateRefused when this process cannot map it.
        """
        self._link.require_session()
        asked_bytes, part = size_bytes(size), checked_part(part, layout)
        reply: pools.OpenPoolResponse = self._link.run(calls.open_pool(name, layout, asked_bytes, devices), timeout_s)
        pool_id = reply.pool.pool_id
        with self._opening:
            if pool_id not in self._pools:
                memory = self._link.on_side(lambda side: PoolMemory.attach(side, pool_id, part))
                self._pools[pool_id] = Pool(
                    self._link,
                    name,
                    memory,
                    created=reply.created,
                    asked_bytes=asked_bytes,
                    order=memory.default_order(),
                )
            pool = self._pools[pool_id]
        require_part(pool.part, part)
        if order is not None:
            pool.order = order
        return pool

    def attach_pool(self, pool_id: str, *, part: int | None = None) -> PoolMemory:
        """Maps a pool that the session has open, for a member of it; the views are its `views`.

        `pool_id` is `Pool.id` of the leader. `part` None: the one of this member's rank, or part 0 of a pool that has
        none for it. Ends with the harbor. Before the leader commits or releases, each member waits for its own
        device [C14].
        """
        options = self._link.options

        def attached(side: SideSocket) -> PoolMemory:
            if part is None:
                return PoolMemory.attach_of_rank(side, pool_id, options.rank, writable=not options.read_only)
            return PoolMemory.attach(side, pool_id, part, writable=not options.read_only)

        memory = self._link.on_side(attached)
        self._attached.append(memory)
        return memory

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
            page: pools.ListPoolsResponse = self._link.run(calls.list_pools(page_token))
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

    def list_sessions(self) -> list[SessionInfo]:
        """Returns all sessions, the ended ones too whose processes may not be gone; raises AdminRequired."""
        sessions: list[SessionInfo] = []
        page_token = ""
        while True:
            page: pools.ListSessionsResponse = self._link.run(calls.list_sessions(page_token))
            sessions.extend(session_info(each) for each in page.sessions)
            page_token = page.next_page_token
            if not page_token:
                return sessions

    def kill_session(self, session_id: str) -> int:
        """Kills every process of a session with SIGKILL; returns how many. Raises SessionNotFound, AdminRequired."""
        reply: pools.KillSessionResponse = self._link.run(calls.kill_session(session_id))
        return reply.killed_process_count

    def upgrade(self, *, timeout_s: float = channel.UPGRADE_TIMEOUT_S) -> Upgrade:
        """Has the service's process replaced, once another has started; returns which one that is.

        The process ends after this, and sessions go on in the next one, whose restart_count is greater. Raises
        UpgradeFailed where the other does not start: this one goes on then. Raises AdminRequired.
        """
        reply: pools.UpgradeResponse = self._link.run(calls.upgrade(), timeout_s)
        return Upgrade(reply.epoch, reply.restart_count)

    def next_warm_task(self, timeout_s: float = 0.0) -> WarmTask[Pool, Sequence] | None:
        """Claims a prefix that an operator wants computed, of any pool opened here; None if none came in time.

        The sequence is this session's to compute, commit and release: see WarmTask. A task for which its pool
        has no room now is tried again until the time is over. Needs connect(..., accepts_warm_tasks=True).
        """
        channel.require_warm_tasks(self._link.options)
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._noticed.update(dict.fromkeys(self._link.take_notices()))
            task = self._claim_noticed()
            left_s = deadline_s - time.monotonic()
            if task is not None or left_s <= 0:
                return task
            wait_s = min(left_s, channel.ROOM_PAUSE_S) if self._noticed else left_s
            self._link.wait_for_notice(wait_s)

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

        Asserts that nothing of this process touches a block any more: the blocks are free at once. Waits for the
        device first [C14]; where that fails the session is left without the assertion. Arrays over the pool keep
        its memory mapped while they live, but it is no longer theirs [C6].
        """
        if self._link.closed:
            return
        try:
            self._link.standing.closing = True
            if self._link.session_lives and self._link.leads:
                # Gone or out of reach: the end of the side socket ends the session all the same.
                with contextlib.suppress(SessionGone, EpochEnded, Unavailable):
                    self._link.require_open()
                    ordering.wait_for(*(pool.order.before_release() for pool in self._pools.values()))
                    self._link.run(calls.close_session())
        finally:
            self._link.close()
            memories = [*(pool.memory for pool in self._pools.values()), *self._attached]
            self._pools.clear()
            self._attached.clear()
            if not self._link.forked:  # a child has neither the memory nor the device
                with contextlib.ExitStack() as closing:
                    for memory in memories:
                        closing.callback(memory.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *rest: object) -> None:
        try:
            self.close()
        except Exception:
            # The error that ended the block says more than one that follows from it, such as a device's.
            if exc_type is None:
                raise
