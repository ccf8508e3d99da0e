"""A real service process for tests: started, awaited by its own words, and checked for what it leaves behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from process_tree import children_of
from waiting import until

DEADLINE_S = 20.0


class ServiceProcess:
    """`kvharbor serve` on a socket of its own. Its log is read as it comes; `wait_for` awaits one event of it.

    Without `names_socket` the settings name it. `process` is the supervisor; the service's process is its child.
    """

    def __init__(
        self,
        socket: Path | str,
        *arguments: str,
        environment: dict[str, str] | None = None,
        working_directory: Path | None = None,
        user: int | None = None,
        launcher: Sequence[str] = (),
        pass_fds: Sequence[int] = (),
        names_socket: bool = True,
    ) -> None:
        self.socket = Path(socket)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("KVHARBOR_")}
        named = [f"--socket={socket}"] if names_socket else []
        command = [*launcher, sys.executable, "-m", "kvharbor.server.cli", "serve", *named, *arguments]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=working_directory,
            env={**inherited, **(environment or {})},
            user=user,
            pass_fds=pass_fds,
        )
        self.lines: list[str] = []
        self._kill_count = 0
        self._arrived = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def target(self) -> str:
        """The address for gRPC clients."""
        return f"unix:{self.socket}"

    @property
    def child_pid(self) -> int:
        """The process that serves now, or was the last to."""
        return int(self.entries("ready")[-1]["pid"])

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """The process that serves does not run meanwhile, as if the machine were overloaded."""
        pid = self.child_pid
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def wait_for(self, event: str, nth: int = 1) -> dict[str, Any]:
        """Returns the nth log entry of that event; fails when the process ends or is silent for too long."""

        def arrived() -> bool:
            return len(self.entries(event)) >= nth or not self._reader.is_alive()

        with self._arrived:
            self._arrived.wait_for(arrived, timeout=DEADLINE_S)
        entries = self.entries(event)
        assert len(entries) >= nth, f"no {event!r} number {nth} in:\n{self.log}"
        return entries[nth - 1]

    @property
    def log(self) -> str:
        """All of stderr so far."""
        return "".join(self.lines)

    def files(self) -> list[Path]:
        """What lies beside the socket, itself included."""
        return sorted(self.socket.parent.glob(f"*{self.socket.stem}.s*"))

    def stop(self) -> int:
        """Sends SIGTERM and returns the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """Sends SIGKILL to the supervisor and waits for the end of everything."""
        self.process.kill()
        self.wait()

    def kill_child(self) -> None:
        """Sends SIGKILL to the process that serves, as soon as the last one that was killed is replaced."""
        self._kill_count += 1
        self.wait_for("ready", self._kill_count)
        os.kill(self.child_pid, signal.SIGKILL)

    def restart_child(self) -> dict[str, Any]:
        """Kills the process that serves and returns what the next one says when it is ready."""
        self.wait_for("ready", self._kill_count + 1)
        ready_count = len(self.entries("ready"))
        self.kill_child()
        return self.wait_for("ready", ready_count + 1)

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Kills the process that serves; the one that stands by does not go on before the end."""
        self.wait_for("ready", self._kill_count + 1)
        (standby,) = until(lambda: [pid for pid in children_of(self.process.pid) if self._stands_by(pid)])
        os.kill(standby, signal.SIGSTOP)
        try:
            self.kill_child()
            yield
        finally:
            os.kill(standby, signal.SIGCONT)

    def wait(self) -> int:
        """Waits for the process, and every child of it, to end by itself; returns its exit status."""
        try:
            status = self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        # They share one stderr: its end is the end of the last.
        self._reader.join(DEADLINE_S)
        if self.process.stderr is not None:
            self.process.stderr.close()
        return status

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leaves nothing running."""
        if self.process.returncode is None:
            self.kill()

    def entries(self, event: str) -> list[dict[str, Any]]:
        """Returns the log entries of that event so far."""
        entries = [json.loads(line) for line in list(self.lines) if line.startswith("{")]
        return [entry for entry in entries if entry.get("event") == event]

    def _stands_by(self, pid: int) -> bool:
        # Not one that is still to run its program: who starts it waits for that.
        program = Path(f"/proc/{pid}/cmdline").read_bytes()
        return pid != self.child_pid and b"kvharbor.server.child" in program

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._arrived:
                self.lines.append(line)
                self._arrived.notify_all()
        with self._arrived:
            self._arrived.notify_all()


def failed_start(
    socket: Path, *flags: str, within_s: float, environment: dict[str, str] | None = None, most_tries: int = 3
) -> str:
    """Starts a service that cannot start; returns its one line.

    It ends with status 2 and leaves nothing behind, each time, and within `within_s` in the quickest of some tries:
    a busy machine takes longer now and then.
    """
    took_s: list[float] = []
    while not took_s or (min(took_s) >= within_s and len(took_s) < most_tries):
        began_at = time.monotonic()
        service = ServiceProcess(socket, *flags, environment=environment)
        status = service.wait()
        took_s.append(time.monotonic() - began_at)
        assert (status, service.files(), len(service.lines)) == (2, [], 1), service.log
    assert min(took_s) < within_s, took_s
    return service.lines[0]
