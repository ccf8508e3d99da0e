"""How both clients use gRPC: options of the channel, errors, and which calls are sent again."""

import contextlib
import time
from collections.abc import Iterator
from math import inf
from typing import Any

import grpc

from kvharbor.client import refusals
from kvharbor.client.address import Address
from kvharbor.client.calls import Call, Repeat
from kvharbor.client.errors import (
    Draining,
    HarborClosed,
    HarborError,
    InvalidField,
    ResumeRequired,
    ServiceUnreachable,
    SessionRequired,
    Starting,
    Unavailable,
)
from kvharbor.client.options import Options
from kvharbor.client.side import Session
from kvharbor.v1 import (
    cache_service_pb2,
    cache_service_pb2_grpc,
    pool_service_pb2,
    pool_service_pb2_grpc,
    stream_service_pb2_grpc,
)

SESSION_KEY = "kvharbor-session"
OPEN_POOL_TIMEOUT_S = 120.0
"""Reserving memory takes about a second for some GiB, and more where the kernel has to find it first."""
UPGRADE_TIMEOUT_S = 60.0
"""A process that does not start by then is given up by the service."""
UNDO_TIMEOUT_S = 1.0
ROOM_PAUSE_S = 0.5
"""Between two claims of a warm task for which the pool has no room."""
MAX_MESSAGE_BYTES = 64 * 2**20
"""A prompt of 2**20 tokens is 4 MiB, its table at most another one."""
MAX_NEWS_S = 0.4
MAX_TRIES = 4
"""Where there is no side socket to tell whether the service is still there."""

_CACHE = cache_service_pb2.DESCRIPTOR.services_by_name["CacheService"]
_POOLS = pool_service_pb2.DESCRIPTOR.services_by_name["PoolService"]

OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Calls are sent again by the links, who know what has become of the service.
    ("grpc.enable_retries", 0),
    # A service that comes back on this host shall be found at once.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 200),
    # The service is on this host: a proxy for the outside world is never on the way.
    ("grpc.enable_http_proxy", 0),
]


class Stubs:
    """The methods of the services on one channel; `unary` has those of one request and one reply."""

    def __init__(self, channel: Any) -> None:
        self.cache: Any = cache_service_pb2_grpc.CacheServiceStub(channel)
        self.stream: Any = stream_service_pb2_grpc.StreamServiceStub(channel)
        pools: Any = pool_service_pb2_grpc.PoolServiceStub(channel)
        owners = {service.full_name: owner for service, owner in ((_CACHE, self.cache), (_POOLS, pools))}
        self.unary: dict[str, Any] = {
            method.name: getattr(owners[service.full_name], method.name)
            for service in (_CACHE, _POOLS)
            for method in service.methods
            if not method.server_streaming
        }


def session_metadata(session: Session | None) -> tuple[tuple[str, str], ...]:
    """Returns what tells the service whose call it is; nothing over TCP, where there is no session."""
    return ((SESSION_KEY, session.token),) if session is not None and session.token else ()


def call_error(failure: grpc.RpcError, address: Address, *, closed: bool, timeout_s: float | None) -> HarborError:
    """Returns the error of a failed call."""
    if closed:
        return HarborClosed("the harbor was closed while the call was under way")
    return refusals.from_rpc(failure, address=address.target, timeout_s=timeout_s)


class Tries:
    """Decides whether a call that failed is sent again, and after how long [C8].

    `may_have_effect`: a process that has ended may have taken it, or the next one is told of it as taken.
    """

    def __init__(self, call: Call[Any], *, has_side: bool, away_wait_s: float | None = None) -> None:
        self.may_have_effect = False
        self._repeat = call.repeat
        self._has_side = has_side
        self._most_news_s = inf if away_wait_s is None else max(away_wait_s, MAX_NEWS_S)
        self._count = 0

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Has what refuses the call for now tell of the tries before."""
        try:
            yield
        except (Unavailable, ResumeRequired) as failure:
            failure.outcome_unknown = self.may_have_effect
            raise

    def again(self, error: HarborError, *, to_another: bool) -> bool:
        """Whether the call may be sent again after `error`; `to_another`: to the next process of the service."""
        self._count += 1
        if isinstance(error, ResumeRequired | Draining | Starting):  # refused before anything was done
            return self._has_side
        self.may_have_effect = True
        if not isinstance(error, ServiceUnreachable) or self._repeat is Repeat.NEVER:
            return False
        if self._repeat is Repeat.TO_ANOTHER and not to_another:
            return False
        return self._has_side or self._count < MAX_TRIES

    def pause_s(self, error: HarborError, until_s: float) -> float:
        """How long to wait for news of the service after `error` before deciding; `until_s` is the call's deadline.

        Its end is told after that of its connections, by its supervisor, which may be late on a busy machine: who can
        do nothing without the news waits for them as long as it waits for a service that is away.
        """
        if isinstance(error, ServiceUnreachable) and self._repeat is Repeat.TO_ANOTHER and self._has_side:
            return min(max(until_s - time.monotonic(), 0.0), self._most_news_s)
        return float(min(0.05 * 2**self._count, MAX_NEWS_S))


def require_warm_tasks(options: Options) -> None:
    """Raises InvalidField for a session that has not said that it accepts warm tasks."""
    if not options.accepts_warm_tasks:
        raise InvalidField.of(
            "accepts_warm_tasks",
            False,
            limit="True",
            remedy="connect(..., accepts_warm_tasks=True) to be told of tasks",
        )


def require_leader(options: Options) -> None:
    """Raises SessionRequired in a member of another process's session, which has no token for calls [C13]."""
    if options.join:
        remedy = "its leader opens the pool and makes all calls, attach_pool(pool_id) maps the pool here"
        raise SessionRequired(f"a member of a session makes no calls: {remedy}", metadata={"remedy": remedy})


def session_required(address: Address) -> SessionRequired:
    """Returns the error for a call that needs blocks, over TCP."""
    remedy = "connect to the service's Unix socket to use blocks"
    return SessionRequired(f"{address.target} gives no session: {remedy}", metadata={"remedy": remedy})
