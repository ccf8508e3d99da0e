"""The two-process test: does memory that this process makes arrive in another?

An arena of a few MiB is made as the service makes it, and a stamp of random bytes written to its end. A fresh process
maps it as a worker would, says what it reads, and writes an answer, which is read here. Whether memory can be exported
is decided when it is allocated, so this is found out before the first worker comes. Both processes are of one
container: it says nothing about workers in other ones.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from io import BufferedRandom
from types import TracebackType
from typing import Final, Self

from kvharbor.gpumem.arena import ArenaKind, Export
from kvharbor.gpumem.errors import ArenaUnproven, GpumemError
from kvharbor.gpumem.remedies import cause_and_remedy
from kvharbor.gpumem.stamp_reader import MESSAGE_BYTES
from kvharbor.gpumem.stamps import STAMP_BYTES, StampPlace, answer_to, export_message
from kvharbor.gpumem.trial_arenas import trial_arena

DEADLINE_S: Final = 60.0
"""For the other process, which has to import its packages and make a context on the device."""
_LEAVE_S: Final = 5.0
_SHOWN_CHARS: Final = 300


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether an arena works between two processes. `cause` and `remedy` are empty where it does."""

    works: bool
    took_s: float
    cause: str = ""
    remedy: str = ""


def check_arena(
    kind: ArenaKind, device: str = "", *, runtime: str | None = None, deadline_s: float = DEADLINE_S
) -> Verdict:
    """Runs the test and returns what came of it; nothing that is wrong with the memory is raised.

    `device` is the UUID of where the arena shall lie, "" for the host. `runtime` is whose calls CUDA_IPC makes, in both
    processes: as in `runtime_of`. Takes some seconds at most; `deadline_s` bounds the other process, not the driver in
    this one, where the device's context is retained as `devices.current` does.
    """
    began_at = time.monotonic()
    try:
        with trial_arena(kind, device, runtime) as (export, place):
            cause, remedy = _shown_to_another(export, place, _environment(runtime), deadline_s)
    except GpumemError as failure:
        cause, remedy = cause_and_remedy(failure)
        cause = f"the memory cannot be made and exported: {cause}"
    return Verdict(not cause, time.monotonic() - began_at, cause, remedy)


def require_arena(kind: ArenaKind, device: str = "", *, runtime: str | None = None) -> None:
    """Raises ArenaUnproven, with cause and remedy, unless `check_arena` finds that the arena works."""
    verdict = check_arena(kind, device, runtime=runtime)
    if not verdict.works:
        raise ArenaUnproven(kind, device=device, cause=verdict.cause, remedy=verdict.remedy)


def _shown_to_another(
    export: Export, place: StampPlace, environment: dict[str, str], deadline_s: float
) -> tuple[str, str]:
    """Returns what is wrong and the remedy; both are empty where all is well."""
    stamp = os.urandom(STAMP_BYTES)
    place.write(stamp)
    with _Reader(environment, deadline_s) as reader:
        reply = reader.ask(export)
        if reply is None:
            return reader.end() or "another process ended without an answer", _SILENT
        if "cause" in reply:
            return f"another process cannot use the memory: {reply['cause']}", reply["remedy"]
        if bytes.fromhex(reply["read"]) != stamp:
            return "another process maps the memory, but reads something else", _STRANGE
        if place.read() != answer_to(stamp):
            return "what another process writes does not arrive here", _STRANGE
        ended = reader.end()
    return ended, _STRANGE if ended else ""


_SILENT: Final = "what it has written to stderr is at the end of the cause; look into the kernel's log as well"
_STRANGE: Final = "this is no state that a setting causes: report it with the output of `kvharbor doctor --json`"


def _environment(runtime: str | None) -> dict[str, str]:
    return dict(os.environ) if runtime is None else {**os.environ, "KVHARBOR_CUDA_RUNTIME": runtime}


class _Reader:
    """The other process. It ends with the context at the latest, unless the driver holds on to it."""

    def __init__(self, environment: dict[str, str], deadline_s: float) -> None:
        self._deadline = time.monotonic() + deadline_s
        self._deadline_s = deadline_s
        # No file: the file system may be read-only. No pipe: nobody would read it meanwhile.
        self._stderr: BufferedRandom = os.fdopen(os.memfd_create("kvharbor-stamp-reader"), "w+b")
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "kvharbor.gpumem.stamp_reader", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._stderr,
                stderr=self._stderr,
                pass_fds=[theirs.fileno()],
                env=environment,
            )

    def ask(self, export: Export) -> dict[str, str] | None:
        """Hands the arena over and returns the reply; None if there is none before the process's end or deadline."""
        self._channel.settimeout(self._left_s())
        try:
            socket.send_fds(self._channel, [export_message(export)], export.fds)
            reply = self._channel.recv(MESSAGE_BYTES)
        except (TimeoutError, ConnectionError):
            return None
        answer: dict[str, str] | None = json.loads(reply) if reply else None
        return answer

    def end(self) -> str:
        """Waits for the process's end, which is due; returns what was wrong with it, empty if nothing."""
        try:
            status = self._process.wait(self._left_s())
        except subprocess.TimeoutExpired:
            return f"another process gave no answer within {self._deadline_s:g} s{self._last_words()}"
        if status == 0:
            return ""
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"another process {how}{self._last_words()}"

    def _left_s(self) -> float:
        return max(self._deadline - time.monotonic(), 0.01)

    def _last_words(self) -> str:
        self._stderr.seek(0)
        words = " ".join(self._stderr.read().decode(errors="replace").split())
        return f": {words[-_SHOWN_CHARS:]}" if words else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._channel.close()
        self._stderr.close()
        self._process.kill()
        # One that hangs inside the driver cannot be ended by anybody; the caller must not hang as well.
        try:
            self._process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            return
