"""`kvharbor serve`: keeps what must outlive the service's process, and that process running.

It imports neither gRPC nor CUDA, parses nothing of what it keeps, and talks to nobody but its children, the kernel and
systemd: whatever ends a service's process ends none of this [S20].
"""

import asyncio
import contextlib
import os
import resource
import signal
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from kvharbor.server.configuration.sources import LoadedSettings
from kvharbor.server.supervision.fd_store import SystemdStore, store_limit, stored_descriptors
from kvharbor.server.supervision.keeper import Store
from kvharbor.server.supervision.notify import Notifier
from kvharbor.server.supervision.offspring import Hear, Offspring
from kvharbor.server.supervision.paths import SocketAccess, claimed, listen_side, socket_paths
from kvharbor.server.supervision.restarts import Restarts, cause_of

log = structlog.get_logger(__name__)

TICK_S = 0.5
STANDBY_PAUSE_S = 0.5
"""From readiness until the next child is made: whoever has just started has better things to do with two cores."""
STANDBY_LIMIT_S = 60.0
_OVERTIME_S = 0.7
"""Beyond the grace, for what a child takes down after it."""


class Supervisor:
    """Runs children one after the other, and has the next one waiting.

    `spawn` makes a child; `grace_s` is what calls in flight may take at its end; a child that says nothing for
    `watchdog_s` (0: for ever) hangs.
    """

    def __init__(
        self, spawn: Callable[[Hear], Offspring], store: Store, notifier: Notifier, *, grace_s: float, watchdog_s: float
    ) -> None:
        self._spawn = spawn
        self._store = store
        self._notifier = notifier
        self._grace_s = grace_s
        self._watchdog_s = watchdog_s
        self._living: dict[int, Offspring] = {}
        self._current: Offspring | None = None
        self._standby: Offspring | None = None
        self._cause: str | None = None
        self._has_served = False
        self._stop_count = 0
        self._stopping = asyncio.Event()
        self._upgrading: asyncio.Task[None] | None = None

    async def run(self, *, after: str) -> int:
        """Serves until told to stop and returns the exit status; `after` is what ended the service before, if known."""
        loop = asyncio.get_running_loop()
        for number, handler in (
            (signal.SIGTERM, self._stop),
            (signal.SIGINT, self._stop),
            (signal.SIGHUP, self.upgrade),
            (signal.SIGCHLD, self._reap),
        ):
            loop.add_signal_handler(number, handler)
        ticking = asyncio.create_task(self._tick())
        try:
            status = await self._serve(after)
            # Not after a failure of our own: what another place has of it may still help.
            self._store.close()
            return status
        finally:
            ticking.cancel()
            if self._upgrading is not None:
                self._upgrading.cancel()
            living = [*self._living.values()]
            for child in living:
                child.kill()
            await asyncio.gather(*(child.ended for child in living))

    def upgrade(self) -> None:
        """Replaces the child by one of the code and the settings that are there now."""
        if self._is_upgrading():
            log.warning("upgrade asked for while one is under way, which goes on as it has begun")
        elif not self._stop_count:
            self._upgrading = asyncio.create_task(self._upgrade())

    async def _serve(self, after: str) -> int:
        restarts = Restarts()
        self._store.end_streams()
        while not self._stop_count:
            child = self._current = self._standby or self._spawned()
            self._standby, self._cause = None, None
            if child is None:
                verdict = restarts.judge("failed", served_s=None)
            else:
                child.start(self._store, after=after)
                status = await child.ended
                self._store.end_streams()
                if self._stop_count:
                    return 0
                if status > 0 and not self._has_served:
                    # It has said why, and nothing depends on it yet.
                    return status
                after = self._cause or cause_of(status)
                verdict = restarts.judge(after, served_s=child.served_s, had_kept=child.standing_by.is_set())
                tell = log.info if (after, status) == ("upgraded", 0) else log.warning
                facts = {"pid": child.pid, "cause": after, "status": status}
                tell("service process ended", **facts, restart_pause_s=verdict.pause_s)
            if verdict.cold:
                log.error("service process broke again and again: what it left is dropped, the next start is cold")
                self._store.close()
            elif child is not None and not child.was_heard:
                # A session that nobody knows of any more would lose its blocks to others while it uses them [G3].
                log.error("not all that the service process wanted kept is there: the next start is cold")
                self._store.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), verdict.pause_s)
        return 0

    def _spawned(self) -> Offspring | None:
        """Returns a new child; None if the system has no room for one now."""
        try:
            child = self._spawn(self._hear)
        except OSError as failure:
            log.error("the service's process cannot be started", error=failure.strerror)
            return None
        self._living[child.pid] = child
        return child

    def _hear(self, child: Offspring, message: dict[str, Any], fds: tuple[int, ...]) -> None:
        child.silent_s = 0.0
        self._store.apply(message, fds)
        match message:
            case {"alive": _}:
                self._notifier.alive()
            case {"standing_by": _}:
                child.standing_by.set()
                log.debug("process stands by", pid=child.pid)
            case {"unusable": str(cause)}:
                child.refusal = cause
            case {"ready": _}:
                self._ready(child)
            case {"upgrade": _}:
                self.upgrade()

    def _ready(self, child: Offspring) -> None:
        child.begin_service()
        self._notifier.ready(child.pid)
        # After a first death the next one may be near.
        asyncio.get_running_loop().call_later(0.0 if self._has_served else STANDBY_PAUSE_S, self._prepare)
        self._has_served = True

    def _prepare(self) -> None:
        """Has the next child wait, all imported: what a restart takes is then what the recovery takes."""
        if self._standby is None and not self._is_upgrading() and not self._stop_count:
            self._standby = self._spawned()

    def _is_upgrading(self) -> bool:
        return self._upgrading is not None and not self._upgrading.done()

    async def _upgrade(self) -> None:
        log.info("upgrade begins")
        fresh = self._spawned()
        if fresh is None:
            self._give_up_upgrade("the system has no room for another process")
            return
        if not await fresh.reaches(fresh.standing_by, STANDBY_LIMIT_S):
            self._give_up_upgrade(_why_not(fresh))
            fresh.kill()
            return
        if self._standby is not None:
            self._standby.kill()
        self._standby = fresh
        if (current := self._current) is None:
            return
        if not current.ready.is_set() and not current.ended.done():
            # What it is taking up is not to be begun anew by another. If it ends over it, the fresh one is the next.
            log.info("upgrade waits until the process before is ready", pid=current.pid)
        if not await current.reaches(current.ready):
            return
        if fresh.ended.done():
            self._give_up_upgrade(_why_not(fresh))
            return
        self._notifier.reloading()
        self._cause = "upgraded"
        self._end(current)

    def _give_up_upgrade(self, cause: str) -> None:
        log.error("upgrade given up: the new process does not start, the old one goes on", cause=cause)
        if self._current is not None:
            self._current.go_on(cause)
        # Not before the upgrade is over; there may be none that waits.
        asyncio.get_running_loop().call_soon(self._prepare)

    def _stop(self) -> None:
        self._stop_count += 1
        self._stopping.set()
        self._notifier.stopping()
        for child in self._living.values():
            if child is self._current and self._stop_count == 1:
                self._end(child)
            else:
                child.kill()

    def _end(self, child: Offspring) -> None:
        """Has a child end in order; one that is not ready yet, or takes too long over it, at once."""
        child.hear()
        if child.ready.is_set():
            child.leave()
            asyncio.get_running_loop().call_later(self._grace_s + _OVERTIME_S, child.kill)
        else:
            child.kill()

    async def _tick(self) -> None:
        """Looks for a hang, in steps of its own: time in which this process did not run is nobody's silence."""
        while True:
            await asyncio.sleep(TICK_S)
            child = self._current
            if child is None or child.ended.done():
                continue
            child.hear()
            child.silent_s += TICK_S
            # Imports take their time, on cores that others use.
            limit_s = self._watchdog_s if child.standing_by.is_set() else max(self._watchdog_s, STANDBY_LIMIT_S)
            if self._watchdog_s and child.silent_s > limit_s and self._cause != "hung":
                log.error("service process hangs", pid=child.pid, silent_s=child.silent_s)
                self._cause = "hung"
                child.kill()

    def _reap(self) -> None:
        """Takes note of every end, also of orphans that process 1 is given."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                child = self._living.pop(ended[0], None)
                if child is not None:
                    child.reaped(os.waitstatus_to_exitcode(ended[1]))
                    self._without(child)

    def _without(self, child: Offspring) -> None:
        if child is self._standby and not self._stop_count:
            self._standby = None
            log.warning("standby process ended", pid=child.pid, status=child.ended.result())
            asyncio.get_running_loop().call_later(STANDBY_LIMIT_S, self._prepare)


def _why_not(child: Offspring) -> str:
    """Says why a child did not come to stand by, or did not stay."""
    if not child.ended.done():
        return f"it takes longer than {STANDBY_LIMIT_S:g} s"
    return child.refusal or f"it ended with status {child.ended.result()}, see the service's standard error"


def supervise(loaded: LoadedSettings, arguments: Sequence[str]) -> int:
    """Claims the socket's path and serves there; returns the exit status. Children get `arguments`.

    Raises StartupError when the path is not to be had.
    """
    settings = loaded.settings
    paths = socket_paths(settings.socket)
    _allow_descriptors()
    access = SocketAccess(settings.socket_mode, settings.socket_group)
    was_killed = paths.side.exists()
    with claimed(paths) as lock, listen_side(paths, access) as listener:

        def spawn(hear: Hear) -> Offspring:
            return Offspring(arguments, (listener.fileno(), lock), hear)

        notifier = Notifier(os.environ)
        store = _store(notifier)
        if was_killed and not store.kept:
            log.warning("the service before was killed: nothing of it is left, this start is cold")

        async def run() -> int:
            supervisor = Supervisor(spawn, store, notifier, grace_s=settings.grace_s, watchdog_s=settings.watchdog_s)
            return await supervisor.run(after="supervisor" if store.kept or was_killed else "")

        return asyncio.run(run())


def _store(notifier: Notifier) -> Store:
    """Returns where things are kept: with systemd as well, where it offers to, and then with what it has from before.

    Nobody owns the path any more by then, so nobody changes that.
    """
    if not (limit := store_limit(os.environ)):
        return Store()
    store = SystemdStore(notifier, limit)
    store.take_up(stored_descriptors(os.environ))
    return store


def _allow_descriptors() -> None:
    """Takes all descriptors that the process may have: a session needs several, and the usual soft limit is 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
