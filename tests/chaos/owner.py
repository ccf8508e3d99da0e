"""The service under test: a supervisor with its service process, and what they take of memory and descriptors."""

import contextlib
import os
import select
import signal
from collections.abc import Callable
from pathlib import Path

from chaos.board import Board, Head
from chaos.points.marks import MARKS
from chaos.reactor import Reactor
from raw_caller import open_descriptor_count
from service_process import ServiceProcess

_TESTS = Path(__file__).parent.parent
_LOOK_S = 0.005
_READY_S = 30.0
_MARK_S = 3.0
_NO_CHILD = 0
_BAD_SIGNS = ("Traceback", "the pool is broken", "unhandled in the event loop", "call failed unexpectedly")


class Owner:
    """Started, watched and struck. `died` is called at each death of the child, with the time."""

    def __init__(self, reactor: Reactor, folder: Path, board: Board, died: Callable[[], None]) -> None:
        self._reactor = reactor
        self._socket = folder / "kv.sock"
        self._board = board
        self._died = died
        paths = (str(_TESTS / "chaos" / "points"), str(_TESTS), *filter(None, [os.environ.get("PYTHONPATH")]))
        self._environment = {"CHAOS_BOARD": str(folder / "board"), "PYTHONPATH": os.pathsep.join(paths)}
        self._services: list[ServiceProcess] = []
        self._child = _NO_CHILD
        self._buried: set[int] = set()
        self._child_fd = -1
        self._is_ending = False
        self.target = f"unix:{self._socket}"

    def start(self) -> None:
        """Starts a supervisor and waits until the service is ready."""
        arguments = ("--memory=64MiB", "--handoff-ttl-s=2", f"--anonymous-tenant=uid-{os.getuid()}")
        service = ServiceProcess(self._socket, *arguments, environment=self._environment)
        self._services.append(service)
        self._is_ending = False
        self._find_child()
        ready = self._reactor.run_until(lambda: bool(service.entries("ready")), _READY_S)
        assert ready, f"the service is not ready after {_READY_S} s:\n{service.log}"

    def strike(self, number: int) -> None:
        """Sends a signal to the child, if there is one now."""
        if self._child:
            with contextlib.suppress(ProcessLookupError):  # dead, and not yet noticed here
                signal.pidfd_send_signal(self._child_fd, number)

    def strike_standby(self) -> bool:
        """Kills the process that waits to take over; False if there is none now."""
        waiting = set(_children(self._services[-1].process.pid)) - {self._child, *self._buried}
        if self._child:
            for pid in waiting:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return bool(self._child and waiting)

    def upgrade(self) -> None:
        """Asks the supervisor for a fresh child."""
        self._services[-1].process.send_signal(signal.SIGHUP)

    def strike_at(self, mark: str, passes: int) -> bool:
        """Has the child kill itself at a mark, after so many passes of it; returns whether it came there in time."""
        fired = self._board.head(Head.FIRED)
        self._board.set_head(Head.PASSES, passes)
        self._board.set_head(Head.ARMED, 1 + list(MARKS).index(mark))
        if MARKS[mark].at_return:
            self.strike(signal.SIGKILL)
        came = self._reactor.run_until(lambda: self._board.head(Head.FIRED) > fired, _MARK_S)
        self._board.set_head(Head.ARMED, 0)
        return came

    def end_supervisor(self, number: int) -> int:
        """Sends a signal that ends the supervisor, waits for its end and its children's; returns its exit status."""
        self._is_ending = True
        service = self._services[-1]
        children: list[int] = []
        for pid in _children(service.process.pid):
            with contextlib.suppress(ProcessLookupError):  # reaped in between
                children.append(os.pidfd_open(pid))
        service.process.send_signal(number)
        # The socket's path is theirs until the last one is gone.
        self._reactor.run_until(
            lambda: service.process.poll() is not None and not self._child and all(map(_ended, children)), _READY_S
        )
        for child in children:
            os.close(child)
        return service.wait()

    def stop_supervisor(self, duration_s: float) -> None:
        """Stops the supervisor for so long."""
        process = self._services[-1].process
        process.send_signal(signal.SIGSTOP)
        self._reactor.after(duration_s, lambda: process.send_signal(signal.SIGCONT))

    def kill(self) -> None:
        """Ends whatever runs."""
        for service in self._services:
            if service.process.poll() is None:
                service.kill()

    def usage(self) -> tuple[int, int]:
        """Returns the anonymous resident bytes and the open descriptors of supervisor and child together."""
        pids = self._services[-1].process.pid, self._child
        return sum(map(_anonymous_bytes, pids)), sum(map(open_descriptor_count, pids))

    def stop(self) -> list[str]:
        """Ends the service in good order; returns whatever was not good in any of its lives."""
        status = self.end_supervisor(signal.SIGTERM)
        faults = [f"the service ended with {status}"] if status else []
        faults += [f"it has left {path}" for path in self._services[-1].files()]
        faults += [f"its log has {sign!r}" for sign in _BAD_SIGNS if sign in self.log]
        return faults

    @property
    def log(self) -> str:
        """What all lives have logged."""
        return "".join(service.log for service in self._services)

    def _find_child(self) -> None:
        if self._is_ending:
            return
        # Those that have just died are listed until the supervisor has reaped them.
        listed = _children(self._services[-1].process.pid)
        self._buried &= {*listed}
        children = [pid for pid in listed if pid not in self._buried]
        try:
            self._child_fd = os.pidfd_open(children[0])
        except (IndexError, ProcessLookupError):
            if self._services[-1].process.poll() is None:
                self._reactor.after(_LOOK_S, self._find_child)
            return
        self._child = children[0]
        self._reactor.watch(self._child_fd, self._bury)

    def _bury(self) -> None:
        self._reactor.forget(self._child_fd)
        os.close(self._child_fd)
        self._buried.add(self._child)
        self._child = _NO_CHILD
        self._died()
        self._find_child()


def _children(pid: int) -> list[int]:
    """Returns the processes that a process has started and not yet reaped."""
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in children.read_text().split()]
        except OSError:
            continue  # that thread has ended
    return found


def _ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 0.0)[0])


def _anonymous_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    anonymous = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(anonymous.split()[1]) * 1024
