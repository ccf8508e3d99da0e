"""Limits on this process, and those that people ask about although they do not matter here."""

import os
from collections.abc import Iterator
from pathlib import Path

from kvharbor.server.doctor.check import Check, Outcome, ok, warn
from kvharbor.server.doctor.place import Place
from kvharbor.server.doctor.surroundings import Surroundings
from kvharbor.server.sizes import format_size

FDS_PER_SESSION = 4
"""Two for as long as it lives, two more for its gRPC connection and while it resumes."""
_FDS_BESIDE = 64

_MEMLOCK = {
    Place.HOST: "LimitMEMLOCK=infinity in the unit, or ulimit -l unlimited",
    Place.CONTAINER: "docker run --ulimit memlock=-1",
    Place.POD: "let the node's container runtime start with LimitMEMLOCK=infinity: a pod cannot set it",
}
_NOFILE = {
    Place.HOST: "LimitNOFILE= in the unit, or ulimit -Hn",
    Place.CONTAINER: "docker run --ulimit nofile=N",
    Place.POD: "let the node's container runtime start with a higher LimitNOFILE: a pod cannot set it",
}


def checks(around: Surroundings) -> Iterator[Check]:
    """Yields the checks of this topic."""
    yield Check("limits.open_files", lambda: _open_files(around))
    yield Check("limits.locked_memory", lambda: _locked_memory(around))
    yield Check("limits.shared_memory", lambda: _shared_memory(around.root))


def _open_files(around: Surroundings) -> Outcome:
    hard = _hard_limit(around.root, "Max open files")
    needed = around.settings.max_sessions * FDS_PER_SESSION + _FDS_BESIDE
    if hard is None or hard >= needed:
        return ok("unlimited" if hard is None else f"{hard}, {needed} are needed for max_sessions")
    return warn(
        f"{hard}: enough for {max(hard - _FDS_BESIDE, 0) // FDS_PER_SESSION} sessions, "
        f"max_sessions is {around.settings.max_sessions}",
        f"raise the hard limit to {needed} ({_NOFILE[around.place]}), or set max_sessions lower",
    )


def _locked_memory(around: Surroundings) -> Outcome:
    hard_bytes = _hard_limit(around.root, "Max locked memory")
    if hard_bytes is None:
        return ok("unlimited")
    return ok(
        f"{format_size(hard_bytes)}: enough for kvharbor, which locks nothing",
        f"an engine that pins a host arena (cudaHostRegister) may need more: {_MEMLOCK[around.place]}",
    )


def _shared_memory(root: Path) -> Outcome:
    try:
        size = os.statvfs(root / "dev/shm")
    except FileNotFoundError:
        return ok("there is no /dev/shm: does not matter, arenas are in no file system")
    size_bytes = size.f_blocks * size.f_frsize
    return ok(f"/dev/shm has {format_size(size_bytes)}: does not matter, arenas are in no file system")


def _hard_limit(root: Path, name: str) -> int | None:
    """Returns a hard limit of this process in the limit's own unit; None where it is unlimited."""
    for line in (root / "proc/self/limits").read_text().splitlines():
        if line.startswith(name):
            hard = line.removeprefix(name).split()[1]
            return None if hard == "unlimited" else int(hard)
    raise OSError(f"/proc/self/limits has no line {name!r}")
