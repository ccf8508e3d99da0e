"""A real service process for tests: started, awaited by its own words, and checked for what it leaves behind."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

DEADLINE_S = 20.0


class ServiceProcess:
    """`kvharbor serve` on a socket of its own. Its log is read as it comes; `wait_for` awaits one event of it."""

    def __init__(
        self,
        socket: Path | str,
        *arguments: str,
        environment: dict[str, str] | None = None,
        working_directory: Path | None = None,
        user: int | None = None,
    ) -> None:
        self.socket = Path(socket)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("KVHARBOR_")}
        command = [sys.executable, "-m", "kvharbor.server.cli", "serve", f"--socket={socket}", *arguments]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=working_directory,
            env={**inherited, **(environment or {})},
            user=user,
        )
        self.lines: list[str] = []
        self._arrived = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def target(self) -> str:
        """The address for gRPC clients."""
        return f"unix:{self.socket}"

    def wait_for(self, event: str) -> dict[str, Any]:
        """Returns the first log entry of that event; fails when the process ends or is silent for too long."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._entry(event) or not self._reader.is_alive(), timeout=DEADLINE_S)
            entry = self._entry(event)
        assert entry is not None, f"no {event!r} in:\n{self.log}"
        return entry

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
        """Sends SIGKILL and waits for the end."""
        self.process.kill()
        self.wait()

    def wait(self) -> int:
        """Waits for the process to end by itself and returns its exit status."""
        try:
            status = self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self._reader.join(DEADLINE_S)
        if self.process.stderr is not None:
            self.process.stderr.close()
        return status

    def entries(self, event: str) -> list[dict[str, Any]]:
        """Returns the log entries of that event so far."""
        entries = [json.loads(line) for line in list(self.lines) if line.startswith("{")]
        return [entry for entry in entries if entry.get("event") == event]

    def _entry(self, event: str) -> dict[str, Any] | None:
        return next(iter(self.entries(event)), None)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._arrived:
                self.lines.append(line)
                self._arrived.notify_all()
        with self._arrived:
            self._arrived.notify_all()
