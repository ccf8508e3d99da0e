"""The processes of the demonstration: one service and its workers, all ended with the block that began them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from kvharbor.client import ServiceUnreachable, Starting, connect

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0


class DemoFailed(Exception):
    """A process of the demonstration ended or did not start."""


class WorkerProcess:
    """A worker at the other end of two pipes."""

    def __init__(self, socket_path: Path, number: int) -> None:
        self.name = f"worker-{number}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvharbor.demo.worker", str(socket_path), self.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def read(self) -> dict[str, Any]:
        """Waits for the next message."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise DemoFailed(f"{self.name} ended with exit code {self._process.wait()}; its messages are above")
        message: dict[str, Any] = json.loads(line)
        if "failed" in message:
            raise DemoFailed(message["failed"])
        return message

    def ask(self, **request: Any) -> dict[str, Any]:
        """Sends a request and waits for its reply."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self.read()

    def stop(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        _end(self._process)
        self._process.stdout.close()


@contextmanager
def service(
    socket_path: Path, memory: str, *more: str, log: IO[bytes] | None = None
) -> "Iterator[subprocess.Popen[bytes]]":
    """Runs `kvharbor serve`, with `more` options; its process, once it serves. It logs to `log`, or where ours goes."""
    command = [sys.executable, "-m", "kvharbor.server.cli", "serve"]
    options = ["--socket", str(socket_path), "--memory", memory, "--log-level", "warning"]
    process = subprocess.Popen([*command, *options, *more], stderr=log)
    try:
        _wait_until_serving(socket_path, process)
        yield process
    finally:
        process.terminate()
        _end(process)


@contextmanager
def workers(socket_path: Path, count: int) -> Iterator[list[WorkerProcess]]:
    """Runs workers; they may still be loading."""
    with ExitStack() as stack:
        started = []
        for number in range(1, count + 1):
            worker = WorkerProcess(socket_path, number)
            stack.callback(worker.stop)
            started.append(worker)
        yield started


def _wait_until_serving(socket_path: Path, process: "subprocess.Popen[bytes]") -> None:
    for _ in range(int(START_TIMEOUT_S / 0.1)):
        try:
            # Its exit is the event that ends waiting early; until then a connection tells.
            code = process.wait(timeout=0.1)
        except subprocess.TimeoutExpired:
            if _serves(socket_path):
                return
        else:
            raise DemoFailed(f"the service ended with exit code {code}; its messages are above")
    raise DemoFailed(f"the service did not serve within {START_TIMEOUT_S:.0f} s")


def _serves(socket_path: Path) -> bool:
    try:
        connect(str(socket_path), client_name="demo").close()
    except (ServiceUnreachable, Starting):
        return False
    return True


def _end(process: "subprocess.Popen[Any]") -> None:
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
