"""The harbor: a session with the service, its pools, and what is asked of both."""

import contextlib
import threading
import time
from collections.abc import Iterator
from collections.abc import Sequence as Items
from typing import Self

from kvharbor.client import calls, channel, leaving, ordering
from kvharbor.client.errors import (
    EpochEnded,
    Full,
    InvalidField,
    PoolNotFound,
    SessionGone,
    StateRefused,
    Unavailable,
    WarmTaskNotFound,
)
from kvharbor.client.link import Link
from kvharbor.client.memory import PoolMemory, checked_part, require_part
from kvharbor.client.ordering import StreamOrder
from kvharbor.client.pool import Pool, PoolHandle
from kvharbor.client.results import WarmTask
from kvharbor.client.sequence import Sequence
from kvharbor.client.service_handle import ServiceHandle
from kvharbor.client.side import SideSocket
from kvharbor.client.sizes import size_bytes
from kvharbor.gpumem import Layout
from kvharbor.v1 import pool_service_pb2 as pools


class Harbor(ServiceHandle):
    """A connection with its session, and the pools that were opened on it. Threads may share it.

    It does not survive a fork: the child's copy of the session is closed, and its calls raise HarborClosed.
    """

    def __init__(self, link: Link) -> None:
        super().__init__(link)
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

        `pool_id` is `Pool.id` of the leader. `part` None: the one of this member's rank, or part 0 where the layout's
        tp_size is 1. Ends with the harbor. Before the leader commits or releases, each member waits for its own
        device [C14]. Raises InvalidField for a part that the pool has not, and for a leader, whose memory is that of
        `open_pool`: it follows epochs.
        """
        options = self._link.options
        if self._link.leads:
            raise InvalidField.of(
                "join", options.join, limit="a leader's join_token", remedy="take the memory of open_pool in the leader"
            )

        def attached(side: SideSocket) -> PoolMemory:
            if part is None:
                return PoolMemory.attach_of_rank(side, pool_id, options.rank, writable=not options.read_only)
            return PoolMemory.attach(side, pool_id, part, writable=not options.read_only)

        memory = self._link.on_side(attached)
        self._attached.append(memory)
        return memory

    def drop_pool(self, name: str, tenant: str | None = None) -> bool:
        """Removes a pool and its cached blocks; returns whether there was one. An administrator may name a `tenant`.

        Raises PoolInUse while another session has it open, or a sequence or a pin exists. A Pool of it that was opened
        here must not be used any more.

        On a device the memory is let go before the call, so nothing of this process may be at work on the pool: raises
        PoolInUse at once while sequences of it live, and StateRefused, MAPPING_IN_USE, while arrays or tensors over
        memory of `cuda_ipc` do. Where the service refuses, the memory is mapped again [C16]. Where it is not known
        whether the pool is dropped (Unavailable), the Pool is over: repeat the call, or open it again.
        """
        try:
            # Never by chance another tenant's, when the own one is gone.
            handle = self.find_pool(name, self.tenant if tenant is None else tenant)
        except PoolNotFound:
            return False
        with self._opening:
            pool = self._pools.get(handle.id)
            if pool is not None and pool.memory.device is not None:
                return self._drop_on_device(pool)
        dropped = self._dropped(handle)
        with self._opening:
            pool = self._pools.pop(handle.id, None)
        if pool is not None:
            pool.blocks.close()
            pool.memory.close()
        return dropped

    def _dropped(self, handle: PoolHandle) -> bool:
        return not self._link.run(calls.drop_pool(handle.id)).already_dropped

    def _drop_on_device(self, pool: Pool) -> bool:
        with self._taken_out(pool):
            leaving.let_go(pool)
            try:
                return self._dropped(pool)
            except StateRefused:
                self._link.on_side(lambda side: leaving.take_back(pool, side))
                on_moved = self._link.options.on_moved
                if pool.memory.moves and on_moved is not None:
                    self._link.ask_user(on_moved, pool)
                raise

    @contextlib.contextmanager
    def _taken_out(self, pool: Pool) -> Iterator[None]:
        """Leaves a pool out of what a new epoch brings back; it returns if the block is refused, else it is over."""
        self._link.atomically(lambda: self._pools.pop(pool.id))
        try:
            yield
        except StateRefused:
            self._link.atomically(lambda: self._pools.setdefault(pool.id, pool))
            raise
        except BaseException:
            pool.blocks.close()
            pool.memory.close()
            raise
        pool.blocks.close()
        pool.memory.close()

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
        device first [C14], and lets go of its memory [C16]; where that fails, as when arrays or tensors over memory of
        `cuda_ipc` live (MAPPING_IN_USE), the session is left without the assertion. Over other pools they keep the
        memory mapped while they live, but it is no longer theirs [C6].
        """
        if self._link.closed:
            return
        try:
            self._link.standing.closing = True
            if self._link.session_lives and self._link.leads:
                # Gone or out of reach: the end of the side socket ends the session all the same.
                with contextlib.suppress(SessionGone, EpochEnded, Unavailable):
                    self._link.require_open()
                    self._link.stream.drain(self._link.options.timeout_s)
                    ordering.wait_for(*(pool.order.before_release() for pool in self._pools.values()))
                    leaving.let_go_for_good(self._pools.values())
                    self._link.run(calls.close_session())
        finally:
            self._link.close()
            for pool in self._pools.values():
                pool.blocks.close()
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
