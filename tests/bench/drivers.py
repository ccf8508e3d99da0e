"""Processes that take commands over a pipe, so that several can be measured in turn, or at the same time.

A command is a line of JSON, and so is its answer.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

STOP_TIMEOUT_S = 20.0


class DriverFailed(Exception):
    """A driver ended, or did not start."""


class Driver:
    """A driver's process at the other end of two pipes."""

    def __init__(self, name: str, process: "subprocess.Popen[str]") -> None:
        self._name = name
        self._process = process

    def send(self, **command: Any) -> None:
        """Sends a command without waiting for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, float]:
        """Waits for the answer of the oldest command that has none yet."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise DriverFailed(f"{self._name} ended with exit code {self._process.wait()}; it has said why")
        answer: dict[str, float] = json.loads(line)
        return answer

    def ask(self, **command: Any) -> dict[str, float]:
        """Sends a command and waits for its answer."""
        self.send(**command)
        return self.answer()


@contextmanager
def driver(
    name: str, command: Sequence[str | Path], *, messages: IO[str] | None = None, **environment: str
) -> Iterator[Driver]:
    """Runs a driver until the block ends; what it has to say goes to `messages`, or where ours goes."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=messages,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        yield Driver(name, process)
    finally:
        end(process)


def ours(module: str, *arguments: str) -> list[str]:
    """Returns the command of a driver that is a module of ours."""
    return [sys.executable, "-m", module, *arguments]


def end(process: "subprocess.Popen[str]") -> None:
    """Ends a process by the end of its pipe, or by force."""
    try:
        process.communicate(timeout=STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
