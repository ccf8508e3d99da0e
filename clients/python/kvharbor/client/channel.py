"""How both clients use gRPC: options of the channel, deadlines, and which calls may be repeated."""

import json
import numbers
from typing import Any

import grpc

from kvharbor.client import refusals
from kvharbor.client.address import Address
from kvharbor.client.errors import (
    HarborClosed,
    HarborError,
    InvalidField,
    ServiceUnreachable,
    SessionLost,
    SessionRequired,
)
from kvharbor.client.side import Session, SideSocket
from kvharbor.v1 import cache_service_pb2, pool_service_pb2

SESSION_KEY = "kvharbor-session"
DEFAULT_TIMEOUT_S = 10.0
OPEN_POOL_TIMEOUT_S = 120.0
"""Reserving memory takes about a second for some GiB, and more where the kernel has to find it first."""
UNDO_TIMEOUT_S = 1.0
ROOM_PAUSE_S = 0.5
"""Between two claims of a warm task for which the pool has no room."""
MAX_MESSAGE_BYTES = 64 * 2**20
"""A prompt of 2**20 tokens is 4 MiB, its table at most another one."""

_CACHE = cache_service_pb2.DESCRIPTOR.services_by_name["CacheService"]
_POOLS = pool_service_pb2.DESCRIPTOR.services_by_name["PoolService"]

# Repeating these changes nothing that the first attempt did, and the reply is as good as the first one's:
# they read, or are idempotent by request_id or by name. Extend and Commit are not here: a repeated Extend
# does not name the blocks again, a repeated Commit would append its tokens twice. Adopt and Unwarm end what
# they name.
_REPEATABLE = {
    _CACHE.full_name: ("Allocate", "Fork", "ClaimWarmTask", "Release", "Lookup", "Stats"),
    _POOLS.full_name: (
        "GetServerInfo",
        "OpenPool",
        "DescribePool",
        "ListPools",
        "DropPool",
        "CloseSession",
    ),
}
_SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [
                {"service": service, "method": method} for service, methods in _REPEATABLE.items() for method in methods
            ],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.05s",
                "maxBackoff": "0.4s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}

OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    # A service that comes back on this host shall be found at once.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # The service is on this host: a proxy for the outside world is never on the way.
    ("grpc.enable_http_proxy", 0),
]


def unary_methods(stubs: list[object]) -> dict[str, Any]:
    """Returns the callables of the stubs of both services, by the method's name."""
    methods = {}
    for service in (_CACHE, _POOLS):
        for method in service.methods:
            if method.server_streaming:
                continue
            owner = next(stub for stub in stubs if hasattr(stub, method.name))
            methods[method.name] = getattr(owner, method.name)
    return methods


def session_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """Returns what tells the service whose call it is; nothing over TCP, where there is no session."""
    return ((SESSION_KEY, token),) if token else ()


def positive_timeout(timeout_s: float) -> float:
    """Returns a timeout as it is, or raises InvalidField: no call is made without a deadline."""
    if not isinstance(timeout_s, numbers.Real) or not 0 < timeout_s < 2**31:
        raise InvalidField.of("timeout_s", timeout_s, limit="seconds above 0", remedy="give the calls some time")
    return timeout_s


def call_error(
    failure: grpc.RpcError,
    address: Address,
    *,
    side: SideSocket | None,
    closed: bool,
    timeout_s: float | None,
) -> HarborError:
    """Returns the error of a failed call; a service that is gone for good has taken the session with it."""
    if closed:
        return HarborClosed("the harbor was closed while the call was under way")
    error = refusals.from_rpc(failure, address=address.target, timeout_s=timeout_s)
    if isinstance(error, ServiceUnreachable) and side is not None and side.lost:
        return SessionLost(f"the service at {address.target} has ended, and the session with it: connect again")
    return error


def require_warm_tasks(session: Session | None) -> None:
    """Raises InvalidField for a session that has not said that it accepts warm tasks."""
    if session is None or not session.accepts_warm_tasks:
        raise InvalidField.of(
            "accepts_warm_tasks",
            False,
            limit="True",
            remedy="connect(..., accepts_warm_tasks=True) to be told of tasks",
        )


def session_required(address: Address) -> SessionRequired:
    """Returns the error for a call that needs blocks, over TCP."""
    remedy = "connect to the service's Unix socket to use blocks"
    return SessionRequired(f"{address.target} gives no session: {remedy}", metadata={"remedy": remedy})
