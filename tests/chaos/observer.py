"""A process that only looks: when does the service answer again, and when is a dead worker's memory usable again?

It looks every 5 ms, which is the resolution of both figures. What it sees it tells with times of the monotonic clock,
which is one for all processes.
"""

import contextlib
import socket
import time

import grpc

from chaos.channel import Channel
from chaos.sessions import OPTIONS, Sessions
from kvharbor.v1 import cache_service_pb2 as cache
from kvharbor.v1 import cache_service_pb2_grpc, pool_service_pb2_grpc
from kvharbor.v1 import pool_service_pb2 as pools

PERIOD_S = 0.005
_DEADLINE_S = 0.25
_NO_LIFE = ("", 0)


class Rising:
    """The total of a counter that begins anew with each process."""

    def __init__(self) -> None:
        self.total = 0
        self._last = 0

    def see(self, value: int) -> None:
        """Takes in its present value."""
        self.total += value - self._last if value >= self._last else value
        self._last = value


class Observer:
    """Tells the harness: served (the service answers again), gone (a session's blocks are usable), wrong.

    It is told of each death, for one may be noticed after the first answer of the next process: that one's next answer
    is told again then.
    """

    def __init__(self, channel: Channel, target: str) -> None:
        self._harness = channel
        self._target = target
        self._sessions = Sessions(target)
        self._life = _NO_LIFE
        self._check_count = 0
        self._evicted = Rising()
        self._connect()

    def run(self) -> None:
        """Looks until told to end."""
        while (message := self._harness.receive(PERIOD_S)) is None or message["kind"] != "end":
            if message is not None:
                self._life = _NO_LIFE
            if self._look_at_pools():
                with contextlib.suppress(grpc.RpcError, OSError):
                    self._look_at_sessions()
        self._harness.send("checked", count=self._check_count, evicted=self._evicted.total)

    def _connect(self) -> None:
        self._channel = grpc.insecure_channel(self._target, options=OPTIONS)
        self._cache = cache_service_pb2_grpc.CacheServiceStub(self._channel)
        self._pools = pool_service_pb2_grpc.PoolServiceStub(self._channel)

    def _look_at_pools(self) -> bool:
        try:
            info = self._pools.GetServerInfo(pools.GetServerInfoRequest(), timeout=_DEADLINE_S)
            stats = self._cache.Stats(cache.StatsRequest(), timeout=_DEADLINE_S)
        except grpc.RpcError:
            self._channel.close()
            self._connect()
            return False
        at = time.monotonic()
        life = (info.epoch, info.restart_count)
        if life != self._life:
            self._life = life
            self._harness.send("served", at=at, epoch=info.epoch)
            self._sessions.reconnect()
        for pool in stats.pools:
            self._check_sum(pool)
            self._evicted.see(pool.counters.evicted_block_count)
        return True

    def _look_at_sessions(self) -> None:
        for session_id, pids in self._sessions.vanished():
            self._harness.send("gone", session_id=session_id, pids=pids, at=time.monotonic())

    def _check_sum(self, pool: cache.PoolStats) -> None:
        self._check_count += 1
        classes = (
            pool.free_block_count,
            pool.reserved_block_count,
            pool.active_block_count,
            pool.cached_block_count,
            pool.warm_block_count,
            pool.quarantined_block_count,
        )
        if sum(classes) != pool.total_block_count or min(classes) < 0:
            self._harness.send("wrong", text=f"G5: {classes} are not {pool.total_block_count}")


def observe(end: socket.socket, target: str) -> None:
    """Runs an observer in this process."""
    with contextlib.suppress(EOFError):
        Observer(Channel(end), target).run()
