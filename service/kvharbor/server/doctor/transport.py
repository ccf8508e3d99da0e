"""The service's settings and its socket: whether one could be started here, and whether one runs."""

import os
from collections.abc import Iterator

from kvharbor.server.commands.health import health_state
from kvharbor.server.doctor.check import ANY_ARENA, Check, Outcome, fail, ok, skipped, warn
from kvharbor.server.doctor.surroundings import Surroundings
from kvharbor.server.errors import CommandError, StartupError
from kvharbor.server.supervision.paths import socket_paths

_ANSWER_S = 2.0


def checks(around: Surroundings) -> Iterator[Check]:
    """Yields the checks of this topic; a socket that was named is somebody else's to make."""
    yield Check("service.settings", lambda: _settings(around), ANY_ARENA)
    if around.socket is None:
        yield Check("service.folder", lambda: _folder(around.settings.socket))
    yield Check("service.answer", lambda: _answer(around))


def _settings(around: Surroundings) -> Outcome:
    if around.settings_failure:
        return fail(around.settings_failure, "correct it; what follows is about the defaults")
    return ok("they can be used")


def _folder(socket: str) -> Outcome:
    try:
        folder = socket_paths(socket).grpc.parent
    except StartupError as refused:
        return warn(str(refused), "name another with the setting socket")
    if not folder.is_dir():
        return warn(
            f"the folder {folder} of the socket is not here",
            f"install -d -m 0750 -g GROUP {folder}, as root; or set another socket",
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        return warn(
            f"user {os.geteuid()} may not write to the folder {folder} of the socket, as `kvharbor serve` has to",
            "run as its owner, give it another, or set another socket",
        )
    return ok(f"{folder} may be written to")


def _answer(around: Surroundings) -> Outcome:
    where = around.socket or around.settings.socket
    try:
        state = health_state(where, timeout_s=_ANSWER_S)
    except CommandError as refused:
        return warn(str(refused), "start it, or name another socket") if around.socket else skipped(str(refused))
    if state != "SERVING":
        return warn(f"the service at {where} says {state}", "wait; its log says what it is at")
    return ok(f"a service answers at {where}")
