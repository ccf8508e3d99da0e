"""The C++ client for tests: built where the packages for it are, and a worker of it in a process of its own."""

import fcntl
import functools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

ROOT = Path(__file__).parents[1]
WORKER = "kvharbor_driven_worker"
BUILT = ROOT / "build" / "cpp"
BUILD_DEADLINE_S = 540.0
ANSWER_DEADLINE_S = 30.0
REQUIRED = "REQUIRE_CPP"
""""1" in this variable makes a failure of what would be skipped. A name with KVHARBOR_ would be the service's."""

# What the build needs, and the Debian package that has it.
PROGRAMS = {
    "cmake": "cmake",
    "g++": "g++",
    "make": "make",
    "pkg-config": "pkg-config",
    "protoc": "protobuf-compiler",
    "grpc_cpp_plugin": "protobuf-compiler-grpc",
}
HEADERS = {"grpcpp/grpcpp.h": "libgrpc++-dev", "google/protobuf/message.h": "libprotobuf-dev"}


class CppError(Exception):
    """What the worker's library has thrown: `kind` is the class that it was caught by."""

    def __init__(self, answer: dict[str, Any]) -> None:
        super().__init__(answer["message"])
        self.kind: str = answer["error"]
        self.reason: str = answer.get("reason", "")
        self.metadata: dict[str, str] = answer.get("metadata", {})
        self.retry_after_ms: int | None = answer.get("retry_after_ms")
        self.outcome_unknown: bool = answer.get("outcome_unknown", False)


def require_build() -> Path:
    """Returns the folder of the built programs; skips, naming them, where packages for the build are missing."""
    missing = missing_packages()
    if missing and os.environ.get(REQUIRED) == "1":
        pytest.fail(f"{REQUIRED}=1, and these Debian packages are missing: {' '.join(missing)}")
    if missing:
        pytest.skip(f"the C++ client needs these Debian packages: {' '.join(missing)}")
    return _build()


def missing_packages() -> list[str]:
    """Returns the Debian packages of what the build needs and does not find."""
    missing = [package for program, package in PROGRAMS.items() if shutil.which(program) is None]
    if "g++" not in missing:
        missing += [package for header, package in HEADERS.items() if not _has_header(header)]
    return missing


def _has_header(header: str) -> bool:
    source = f"#if !__has_include(<{header}>)\n#error missing\n#endif\n"
    command = ["g++", "-E", "-x", "c++", "-o", "/dev/null", "-"]
    return subprocess.run(command, input=source, text=True, capture_output=True, check=False).returncode == 0


@functools.cache
def _build() -> Path:
    BUILT.mkdir(parents=True, exist_ok=True)
    with (BUILT / "lock").open("w") as lock:  # other test runs build it too
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(
            ["make", "cpp"], cwd=ROOT, capture_output=True, text=True, timeout=BUILD_DEADLINE_S, check=False
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return BUILT


class CppWorker:
    """The test's end of a worker: `worker.allocate("name", 0, 0, *tokens)` sends a line and returns its answer.

    The operations and their words are those of clients/cpp/tests/driven_worker.cpp.
    """

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [require_build() / WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self._unread = b""

    @classmethod
    def connected(cls, socket: Path | str, *, timeout_s: float = 10.0) -> Self:
        """Starts a worker and opens its session."""
        worker = cls()
        try:
            worker.call("connect", socket, round(timeout_s * 1000))
        except BaseException:
            worker.discard()
            raise
        return worker

    def __getattr__(self, operation: str) -> Any:
        return functools.partial(self.call, operation)

    def call(self, operation: str, *words: object) -> Any:
        """Has the worker do something; returns what comes of it, or raises CppError."""
        self.begin(operation, *words)
        return self.answer()

    def begin(self, operation: str, *words: object) -> None:
        """As `call`, and leaves the answer to `answer`."""
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(str(word) for word in (operation, *words)).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """Waits for the answer to what was begun first."""
        assert self.process.stdout is not None
        until = time.monotonic() + ANSWER_DEADLINE_S
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self.process.stdout], [], [], max(until - time.monotonic(), 0.0))
            assert ready, "the worker does not answer"
            piece = os.read(self.process.stdout.fileno(), 65536)
            assert piece, f"the worker has ended: {self.process.wait(ANSWER_DEADLINE_S)}"
            self._unread += piece
        line, self._unread = self._unread.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise CppError(answer)
        return answer["result"]

    def kill(self) -> None:
        """Kills the process with SIGKILL and waits for its end."""
        self.process.kill()
        self.process.wait(ANSWER_DEADLINE_S)

    def end(self) -> int:
        """Lets the process end by itself, its objects destroyed; returns its exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(ANSWER_DEADLINE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.discard()

    def discard(self) -> None:
        """Ends the process whatever it does."""
        if self.process.poll() is None:
            self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
