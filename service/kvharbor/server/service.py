"""The running service: assembled, served until a signal, and taken down in order."""

import asyncio
import contextlib
import gc
import os
import resource
import secrets
import signal
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvharbor.gpumem import memory_room
from kvharbor.server.errors import Draining, StartupError
from kvharbor.server.gate import Callers, Gate
from kvharbor.server.listen import listen_side, listen_tcp, listen_unix
from kvharbor.server.owner import offset_clock
from kvharbor.server.paths import SocketAccess, SocketPaths, claimed, socket_paths
from kvharbor.server.pool_calls import PoolCalls
from kvharbor.server.pools import Pools
from kvharbor.server.prefix_calls import PrefixCalls
from kvharbor.server.sequence_calls import SequenceCalls
from kvharbor.server.sessions import Peer, Session, Sessions
from kvharbor.server.settings import Settings
from kvharbor.server.side import Attachment, SideRules, SideServer
from kvharbor.server.sizes import Share
from kvharbor.server.sources import LoadedSettings
from kvharbor.server.watch_call import WatchCall
from kvharbor.v1 import cache_service_pb2, cache_service_pb2_grpc, pool_service_pb2, pool_service_pb2_grpc

log = structlog.get_logger(__name__)

EXIT_BUG = 70
"""Exit status after an invariant violation: the code of a software error in sysexits.h."""

# A call counts as ended when its handler returns; the answer is still to be written then.
_LAST_ANSWERS_S = 0.2

_SERVICE_NAMES = (
    pool_service_pb2.DESCRIPTOR.services_by_name["PoolService"].full_name,
    cache_service_pb2.DESCRIPTOR.services_by_name["CacheService"].full_name,
)


class CacheCalls(SequenceCalls, PrefixCalls, WatchCall):
    """CacheService, of its three parts."""

    def __init__(self, gate: Gate, callers: Callers, pools: Pools, sessions: Sessions, settings: Settings) -> None:
        SequenceCalls.__init__(self, gate, callers, pools, handoff_ttl_s=settings.handoff_ttl_s)
        PrefixCalls.__init__(self, gate, callers, pools, sessions)
        WatchCall.__init__(self, gate, callers, pools, progress_s=settings.watch_progress_s)


@dataclass(frozen=True, slots=True)
class Service:
    """The parts that shutdown has to reach."""

    gate: Gate
    pools: Pools
    health: health.aio.HealthServicer
    addresses: dict[str, str | None]


def serve(loaded: LoadedSettings) -> None:
    """Serves until SIGTERM or SIGINT and leaves nothing behind. Raises StartupError when it cannot start."""
    paths = socket_paths(loaded.settings.socket)
    memory_bytes = _budget_bytes(loaded.settings)
    loaded.require_pools_fit(memory_bytes)
    _allow_descriptors()
    with claimed(paths):
        asyncio.run(_serve(loaded, paths, memory_bytes))


async def _serve(loaded: LoadedSettings, paths: SocketPaths, memory_bytes: int) -> None:
    settings = loaded.settings
    stop = _stop_signals()
    asyncio.get_running_loop().set_exception_handler(_log_unhandled)
    async with _started(settings, paths, memory_bytes) as service:
        log.info("settings", **loaded.set_by_operator())
        service.gate.open()
        for name in ("", *_SERVICE_NAMES):
            await service.health.set(name, health_pb2.HealthCheckResponse.SERVING)
        # What start-up has made lives as long as the process: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        log.info("ready", pid=os.getpid(), epoch=service.pools.epoch, memory_bytes=memory_bytes, **service.addresses)
        await stop.acquire()
        log.info("draining", grace_s=settings.grace_s)
        await service.health.enter_graceful_shutdown()
        service.gate.drain()
        service.pools.end_watches(Draining())
        await _first_of(service.gate.idle(), stop.acquire(), timeout_s=settings.grace_s)
    log.info("stopped")


@contextlib.asynccontextmanager
async def _started(settings: Settings, paths: SocketPaths, memory_bytes: int) -> AsyncIterator[Service]:
    """Runs the parts in order, and takes them down in the opposite one."""
    version = metadata.version("kvharbor")
    epoch = secrets.token_hex(6)
    gate = Gate()
    # A time taken from elsewhere shows at once: it is days off.
    clock = offset_clock(1e6 + secrets.randbelow(10**6))
    pools = Pools(settings, memory_bytes=memory_bytes, epoch=epoch, clock=clock, crash=crash)
    sessions = Sessions(pools.end_session)
    callers = Callers(sessions, settings.anonymous_tenant)
    server = grpc.aio.server(options=_options(settings))
    pool_calls = PoolCalls(
        gate, callers, pools, sessions, server_version=version, max_message_bytes=settings.max_message_bytes
    )
    pool_service_pb2_grpc.add_PoolServiceServicer_to_server(pool_calls, server)
    cache_calls = CacheCalls(gate, callers, pools, sessions, settings)
    cache_service_pb2_grpc.add_CacheServiceServicer_to_server(cache_calls, server)
    health_servicer = health.aio.HealthServicer()
    for name in ("", *_SERVICE_NAMES):
        await health_servicer.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    names = (*_SERVICE_NAMES, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)

    def attach(session: Session, pool_id: str) -> Attachment:
        opened = session.opened.get(pool_id)
        if opened is None:
            raise pools.unknown(pool_id)
        opened.served.warm.welcome(session)
        return Attachment(pool_calls.describe(opened.served), os.dup(opened.served.arena.fd))

    rules = SideRules(
        epoch=epoch,
        server_version=version,
        hello_timeout_s=settings.hello_timeout_s,
        max_sessions=settings.max_sessions,
        identify=lambda pid, uid: Peer(pid, uid, settings.tenant_of(uid), settings.administrates(uid)),
        attach=attach,
        refusal=lambda: gate.refusal,
        crash=crash,
    )
    access = SocketAccess(settings.socket_mode, settings.socket_group)
    async with contextlib.AsyncExitStack() as undo:
        undo.push_async_callback(pools.close, Draining())
        undo.push_async_callback(sessions.end_all)
        side = SideServer(listen_side(paths, access), sessions, rules)
        undo.push_async_callback(side.close)
        # Before the side sockets go: calls that the grace did not see end must not outlive their sessions.
        undo.push_async_callback(server.stop, _LAST_ANSWERS_S)
        tcp = None if settings.listen is None else listen_tcp(server, settings.listen, paths.port)
        listen_unix(server, paths, access)
        await server.start()
        side.start()
        addresses = {"socket": str(paths.grpc), "side_socket": str(paths.side), "listen": tcp}
        yield Service(gate, pools, health_servicer, addresses)


def crash(failure: BaseException) -> None:
    """Logs what broke and ends the process at once: an owner that does not know its state must not go on."""
    log.critical("the pool is broken, the process ends", exc_info=failure)
    os._exit(EXIT_BUG)


def _options(settings: Settings) -> list[tuple[str, int]]:
    return [
        # Without it two services can bind one port, and each gets half of the calls.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", settings.max_message_bytes),
        ("grpc.max_concurrent_streams", 1024),
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ]


def _allow_descriptors() -> None:
    """Takes all descriptors that the process may have: a session needs two, and the usual soft limit is 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _budget_bytes(settings: Settings) -> int:
    room = memory_room()
    if isinstance(settings.memory, Share):
        return settings.memory.of(room.available_bytes)
    if settings.memory > room.available_bytes:
        raise StartupError(
            f"setting memory: needs {settings.memory} bytes, have {room.available_bytes} "
            f"(limited by {room.limited_by}): set less, or raise the limit"
        )
    return settings.memory


def _stop_signals() -> asyncio.Semaphore:
    """Counts SIGTERM and SIGINT from now on. As process 1 a program without a handler would ignore them."""
    received = asyncio.Semaphore(0)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, received.release)
    return received


async def _first_of(*waits: Coroutine[Any, Any, object], timeout_s: float) -> None:
    tasks = [asyncio.create_task(wait) for wait in waits]
    await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


def _log_unhandled(_: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    failure = context.get("exception")
    log.error(
        "unhandled in the event loop",
        message=context.get("message"),
        exc_info=failure if isinstance(failure, BaseException) else None,
    )
