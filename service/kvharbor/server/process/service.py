"""The life of one service process: it takes up what is kept or begins anew, serves, and leaves."""

import asyncio
import errno
import gc
import os
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from kvharbor.server.configuration.settings import Settings
from kvharbor.server.configuration.sources import LoadedSettings
from kvharbor.server.errors import Draining, StartupError
from kvharbor.server.pools.life import Life
from kvharbor.server.process.assembly import Service, assembled
from kvharbor.server.process.declared_pools import make_declared
from kvharbor.server.process.device_survey import surveyed
from kvharbor.server.process.earlier_epoch import EarlierEpoch
from kvharbor.server.process.memory_budget import memory_budget_bytes
from kvharbor.server.process.stall import ServiceLoop
from kvharbor.server.sizes import exact_size
from kvharbor.server.supervision.crash import crash
from kvharbor.server.supervision.supervised import Supervised

log = structlog.get_logger(__name__)

HEARTBEAT_S = 0.5
_LITTLE_BYTES = 2**20
"""Less than a single block of most models."""


def serve(loaded: LoadedSettings, supervised: Supervised, listener: socket.socket) -> None:
    """Serves until told to leave. Raises StartupError when it cannot start; any other failure ends the process."""
    try:
        kept = Life.kept(supervised)
        stalled_s = 0.0 if kept is None else kept.stalled_s
        with asyncio.Runner(loop_factory=lambda: ServiceLoop(stalled_s)) as runner:
            runner.run(_serve(loaded, kept, supervised, listener))
    except StartupError:
        raise
    except OSError as failure:
        if failure.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            crash(failure)
        # Nothing is broken, and what is kept must not be taken for it.
        raise StartupError(f"the system has no room for the service: {failure.strerror}; raise its limits") from None
    except Exception as failure:
        crash(failure)


async def _life(loaded: LoadedSettings, kept: Life | None, supervised: Supervised) -> Life:
    """Returns the life to go on with, or a new one. Memory, devices and epoch stay for its length, whatever is set."""
    if kept is None:
        # Without it the rest means nothing.
        for name in [*supervised.kept]:
            supervised.drop(name)
        life = await _new_life(loaded.settings)
        loaded.require_pools_fit(life.memory_bytes)
        life.settings = loaded.settings.lasting
    else:
        life = kept
        life.restarts[supervised.after] = life.restarts.get(supervised.after, 0) + 1
        if life.listen is None:
            # Nothing is bound yet: what is set now will be.
            life.settings["listen"] = loaded.settings.lasting["listen"]
    life.keep(supervised)
    return life


async def _new_life(settings: Settings) -> Life:
    if settings.arena_kind == "host":
        return Life.begun(memory_budget_bytes(settings))
    # A device takes its time, and is not called on the event loop.
    return Life.begun_on(await asyncio.to_thread(surveyed, settings), settings.arena_kind)


async def _serve(loaded: LoadedSettings, kept: Life | None, supervised: Supervised, listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_log_unhandled)
    leave = asyncio.Event()
    supervised.listen(leave.set)
    _beat(loop, supervised.alive)
    life = await _life(loaded, kept, supervised)
    async with assembled(loaded.settings, life, supervised, listener) as service:
        if not life.was_tried_out:
            await service.arenas.try_out()
            # Only now: whoever goes on after a death on the way tries it again [S32].
            life.was_tried_out = True
            life.keep(supervised)
        log.info("settings", **loaded.set_by_operator())
        for changed in life.kept_settings(loaded.settings.lasting):
            log.warning(
                "setting differs from the one in force, which stays until a cold start",
                setting=changed.name,
                in_force=changed.in_force,
                wanted=changed.wanted,
                remedy="stop the service and start it",
            )
        if life.memory_bytes < _LITTLE_BYTES:
            remedy = "raise memory, whose unit may be a mistake"
            log.warning("memory has hardly room for a pool", memory=exact_size(life.memory_bytes), remedy=remedy)
        await service.arenas.start()
        await service.pools.recover(service.sessions)
        service.side.start()
        earlier = EarlierEpoch(life.arena, supervised.after if kept is None else "", service.side.stale_pids)
        await make_declared(service.pools, loaded.settings, earlier)
        service.gate.open()
        await service.readiness.ready()
        # What start-up has made lives as long as the process: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        supervised.ready()
        facts = {"pid": os.getpid(), "epoch": life.epoch, "restart_count": life.restart_count}
        log.info("ready", **facts, memory_bytes=life.memory_bytes, **service.addresses)
        await leave.wait()
        await _drain(service, loaded.settings.grace_s)
    log.info("stopped")


async def _drain(service: Service, grace_s: float) -> None:
    """Takes no more calls, and lets those under way end."""
    log.info("draining", grace_s=grace_s)
    await service.readiness.draining()
    service.gate.drain()
    service.pools.end_watches(Draining())
    service.streams.finish(Draining())
    await _within(service.gate.idle(), grace_s)


async def _within(wait: Coroutine[Any, Any, object], timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await wait
    except TimeoutError:
        log.warning("calls under way do not end in the grace", grace_s=timeout_s)


def _beat(loop: asyncio.AbstractEventLoop, alive: Callable[[], None]) -> None:
    alive()
    loop.call_later(HEARTBEAT_S, _beat, loop, alive)


def _log_unhandled(_: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    failure = context.get("exception")
    log.error(
        "unhandled in the event loop",
        message=context.get("message"),
        exc_info=failure if isinstance(failure, BaseException) else None,
    )
