"""A worker process that runs what a test sends it, statement by statement, and that may die at any of them.

Run as a program it is the worker: `caller` is its RawCaller, and what a statement assigns to `result` goes back.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_FORK = """
import signal
done, told = os.pipe()
result = os.fork()
if not result:
    exec(then)
    os.write(told, b".")
    while True:
        signal.pause()
os.read(done, 1)
os.close(done)
os.close(told)
"""


class SessionWorker:
    """The test's end of a worker with a session of its own, or, with `hello`, with another first request."""

    def __init__(
        self, grpc_path: Path | str, *, without_session: bool = False, environment: Mapping[str, str] = os.environ
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(grpc_path), *(["without-session"] if without_session else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"},
        )
        self._children: list[int] = []
        self.answer()

    @property
    def pid(self) -> int:
        """The process."""
        return self.process.pid

    def run(self, source: str, **values: Any) -> Any:
        """Runs statements in the worker, with `values` as variables; returns what they have assigned to `result`."""
        self.begin(source, **values)
        return self.answer()

    def begin(self, source: str, **values: Any) -> None:
        """As `run`, for statements that do not end."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([source, values]) + "\n")
        self.process.stdin.flush()

    def fork(self, then: str = "pass") -> None:
        """Makes a child of the worker, which does `then`, and nothing more until `end_children`."""
        self._children.append(self.run(_FORK, then=then))

    def end_children(self) -> None:
        """Kills the children: they have lived on whatever became of the worker."""
        while self._children:
            os.kill(self._children.pop(), signal.SIGKILL)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal; SIGKILL is waited for."""
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait(10)

    def kill(self) -> None:
        """Kills the worker and waits until it is gone."""
        self.signal(signal.SIGKILL)

    def close(self) -> None:
        """Ends the worker whatever it does, and its children."""
        self.end_children()
        if self.process.poll() is None:
            self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def answer(self) -> Any:
        """Waits for the end of what was begun, and returns its result."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the worker has ended"
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _main() -> None:
    import raw_caller

    variables: dict[str, Any] = {"raw": raw_caller, "os": os, "path": sys.argv[1]}
    if len(sys.argv) == 2:
        variables["caller"] = raw_caller.RawCaller(sys.argv[1])
    result = None
    while True:
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
        line = sys.stdin.readline()
        if not line:
            return
        source, values = json.loads(line)
        variables.update(values, result=None)
        exec(source, variables)
        result = variables["result"]


if __name__ == "__main__":
    _main()
