"""The parts of a service process: made, wired, run, and taken down in the opposite order."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from importlib import metadata

import grpc
import structlog
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvharbor.server.calls.gate import Callers, Gate
from kvharbor.server.calls.pool_calls import PoolCalls
from kvharbor.server.calls.prefix_calls import PrefixCalls
from kvharbor.server.calls.record_call import RecordCall
from kvharbor.server.calls.resume_call import ResumeCall
from kvharbor.server.calls.sequence_calls import SequenceCalls
from kvharbor.server.calls.sequence_operations import SequenceOperations
from kvharbor.server.calls.timings import Histogram
from kvharbor.server.calls.watch_call import WatchCall
from kvharbor.server.configuration.settings import Settings
from kvharbor.server.errors import Draining
from kvharbor.server.memory.arenas import Arenas
from kvharbor.server.metrics.http_port import HttpPort, liveness_page, readiness_page
from kvharbor.server.metrics.metrics import Metrics
from kvharbor.server.pools.life import Life
from kvharbor.server.pools.pools import Pools
from kvharbor.server.pools.session_end import end_in_pool
from kvharbor.server.process.arena_choice import arenas_of
from kvharbor.server.process.listen import listen_http, listen_tcp, listen_unix
from kvharbor.server.process.readiness import Readiness
from kvharbor.server.process.stall import ServiceLoop
from kvharbor.server.scheduling.owner import offset_clock
from kvharbor.server.sessions.members import Mode
from kvharbor.server.sessions.peer import Peer
from kvharbor.server.sessions.session import Session
from kvharbor.server.sessions.sessions import Sessions
from kvharbor.server.side.attaching import Attachment, attachment, status_attachment
from kvharbor.server.side.side import SideRules, SideServer
from kvharbor.server.stream.stream_calls import StreamCalls
from kvharbor.server.supervision.crash import crash
from kvharbor.server.supervision.paths import SocketAccess, socket_paths
from kvharbor.server.supervision.supervised import Supervised
from kvharbor.v1 import (
    cache_service_pb2,
    cache_service_pb2_grpc,
    pool_service_pb2,
    pool_service_pb2_grpc,
    side_pb2,
    stream_service_pb2,
    stream_service_pb2_grpc,
)

log = structlog.get_logger(__name__)

# A call counts as ended when its handler returns; the answer is still to be written then.
_LAST_ANSWERS_S = 0.2

_SERVICE_NAMES = (
    pool_service_pb2.DESCRIPTOR.services_by_name["PoolService"].full_name,
    cache_service_pb2.DESCRIPTOR.services_by_name["CacheService"].full_name,
    stream_service_pb2.DESCRIPTOR.services_by_name["StreamService"].full_name,
)


class CacheCalls(SequenceCalls, ResumeCall, PrefixCalls, WatchCall, RecordCall):
    """CacheService, of its parts."""

    def __init__(
        self,
        gate: Gate,
        callers: Callers,
        pools: Pools,
        sessions: Sessions,
        sequences: SequenceOperations,
        settings: Settings,
    ) -> None:
        SequenceCalls.__init__(self, gate, callers, pools, sequences)
        ResumeCall.__init__(self, gate, callers, pools)
        PrefixCalls.__init__(self, gate, callers, pools, sessions)
        WatchCall.__init__(self, gate, callers, pools, progress_s=settings.watch_progress_s)
        RecordCall.__init__(self, gate, callers, pools)


@dataclass(frozen=True, slots=True)
class Service:
    """The parts that start and end have to reach. Its `side` is still to be started, its `gate` to be opened."""

    gate: Gate
    arenas: Arenas
    pools: Pools
    sessions: Sessions
    streams: StreamCalls
    side: SideServer
    readiness: Readiness
    addresses: dict[str, str | None]


@contextlib.asynccontextmanager
async def assembled(
    settings: Settings, life: Life, supervised: Supervised, listener: socket.socket
) -> AsyncIterator[Service]:
    """Runs the parts while the context lasts; takes over the side socket's `listener`."""
    paths = socket_paths(settings.socket)
    version = metadata.version("kvharbor")
    gate = Gate(life.epoch)
    arenas = arenas_of(settings, life, supervised)
    pools = Pools(settings, life, supervised, arenas, clock=offset_clock(life.clock_offset_s), crash=crash)
    sessions = Sessions(supervised, end_in_pool, crash)
    sessions.restore()
    callers = Callers(sessions, settings.anonymous_tenant)
    server = grpc.aio.server(options=_options(settings))
    pool_calls = PoolCalls(
        gate,
        callers,
        pools,
        sessions,
        life,
        supervised.upgrade,
        kept_settings=life.kept_settings(settings.lasting),
        server_version=version,
        max_message_bytes=settings.max_message_bytes,
    )
    pool_service_pb2_grpc.add_PoolServiceServicer_to_server(pool_calls, server)
    sequences = SequenceOperations(pools, handoff_ttl_s=settings.handoff_ttl_s)
    cache_calls = CacheCalls(gate, callers, pools, sessions, sequences, settings)
    cache_service_pb2_grpc.add_CacheServiceServicer_to_server(cache_calls, server)
    streams = StreamCalls(gate, callers, pools, sequences)
    stream_service_pb2_grpc.add_StreamServiceServicer_to_server(streams, server)
    readiness = Readiness(_SERVICE_NAMES)
    await readiness.starting()
    health_pb2_grpc.add_HealthServicer_to_server(readiness.servicer, server)
    names = (*_SERVICE_NAMES, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)

    def attach(session: Session, asked: side_pb2.Attach, mode: Mode) -> Attachment:
        served = pools.opened(session, asked.pool_id).served
        attached = attachment(served, pool_calls.describe(served), asked, mode, allow_mps=settings.allow_mps)
        served.warm.welcome(session)
        return attached

    rules = SideRules(
        epoch=life.epoch,
        server_version=version,
        hello_timeout_s=settings.hello_timeout_s,
        max_sessions=settings.max_sessions,
        identify=lambda pid, uid: Peer(pid, uid, settings.tenant_of(uid), settings.administrates(uid)),
        attach=attach,
        attach_status=lambda session, asked: status_attachment(pools.opened(session, asked.pool_id).served),
        refusal=lambda: gate.refusal,
        crash=crash,
    )
    async with contextlib.AsyncExitStack() as undo:
        undo.callback(arenas.close)
        undo.push_async_callback(pools.close, Draining())
        undo.callback(sessions.stop)
        side = SideServer(listener, sessions, rules)
        undo.push_async_callback(side.close)
        # Before the side sockets go: calls that the grace did not see end must not outlive their sessions.
        undo.push_async_callback(server.stop, _LAST_ANSWERS_S)
        addresses: dict[str, str | None] = {"socket": str(paths.grpc), "side_socket": str(paths.side)}
        # A port that was chosen by the kernel stays that of this life.
        address = life.listen or settings.listen
        addresses["listen"] = None if address is None else listen_tcp(server, address, paths.port)
        life.listen = addresses["listen"]
        life.keep(supervised)
        listen_unix(server, paths, SocketAccess(settings.socket_mode, settings.socket_group))
        loop_lag = Histogram()
        _tick(life, supervised, loop_lag)
        if settings.metrics_listen is not None:
            metrics = Metrics(
                pools,
                sessions.all,
                gate,
                life,
                loop_lag=loop_lag,
                version=version,
                series_limit=settings.metrics_max_tenants,
            )
            http_listener, addresses["metrics_listen"] = listen_http(settings.metrics_listen)
            pages = {"/metrics": metrics.page, "/healthz": liveness_page(), "/readyz": readiness_page(gate)}
            http = HttpPort(http_listener, pages)
            undo.push_async_callback(http.close)
            await http.start()
        await server.start()
        yield Service(gate, arenas, pools, sessions, streams, side, readiness, addresses)


def _tick(life: Life, supervised: Supervised, loop_lag: Histogram) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, ServiceLoop)

    def ticked(late_s: float, stalled_s: float) -> None:
        loop_lag.add(late_s)
        if stalled_s:
            life.stall_count += 1
            life.stalled_s += stalled_s
            life.keep(supervised)
            log.warning("the process did not run, deadlines are put off", stalled_s=round(stalled_s, 3))

    loop.tick(ticked)


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
