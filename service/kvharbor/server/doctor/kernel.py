"""What the service needs of the kernel, tried out rather than read from its version."""

import errno
import fcntl
import os
import re
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from kvharbor.gpumem.arena import ArenaKind
from kvharbor.server.doctor.check import ANY_ARENA, Check, Outcome, fail, ok, warn
from kvharbor.server.doctor.place import SHARED_PIDS
from kvharbor.server.doctor.surroundings import Surroundings
from kvharbor.server.sessions import peer

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_DESCRIPTOR = struct.Struct("i")


def checks(around: Surroundings) -> Iterator[Check]:
    """Yields the checks of this topic."""
    yield Check("kernel.release", lambda: ok(os.uname().release))
    yield Check("kernel.pidfd", _pidfd, ANY_ARENA)
    yield Check("kernel.peer_pidfd", lambda: _peer_pidfd(around))
    yield Check("kernel.sealed_memory", _sealed_memory, frozenset({ArenaKind.HOST}))
    yield Check("kernel.huge_pages", lambda: _huge_pages(around.root))


def _pidfd() -> Outcome:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as failure:
        if failure.errno not in (errno.ENOSYS, errno.EPERM):
            raise
        return fail(
            f"pidfd_open: {failure.strerror}: the death of a worker cannot be proved",
            "use Linux 5.3 or later; in a container allow pidfd_open in its seccomp profile",
        )
    return ok("pidfd_open works")


def _peer_pidfd(around: Surroundings) -> Outcome:
    one, other = socket.socketpair()
    with one, other:
        try:
            answer = one.getsockopt(socket.SOL_SOCKET, peer.SO_PEERPIDFD, _DESCRIPTOR.size)
        except OSError as failure:
            if failure.errno != errno.ENOPROTOOPT:
                raise
            return warn(
                "the kernel has no SO_PEERPIDFD: workers are found by pid, so only those of the service's own PID "
                "namespace are let in",
                f"{SHARED_PIDS[around.place]}; or use Linux 6.5 or later",
            )
    os.close(*_DESCRIPTOR.unpack(answer))
    return ok("SO_PEERPIDFD works: workers may be in other PID namespaces")


def _sealed_memory() -> Outcome:
    fd = os.memfd_create("kvharbor-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    finally:
        os.close(fd)
    if sealed & _SEALS != _SEALS:
        return fail(f"seals of a memory file are {sealed:#x}, not {_SEALS:#x}", "use Linux 3.17 or later itself")
    return ok("memory files can be sealed in size")


def _huge_pages(root: Path) -> Outcome:
    try:
        setting = (root / "sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
    except FileNotFoundError:
        return ok("this kernel has none for shared memory")
    chosen = re.search(r"\[(\w+)\]", setting)
    how = chosen[1] if chosen else setting.strip()
    if how in ("never", "deny"):
        return ok(
            f"shared memory: {how}: host arenas are made of small pages",
            "as root: echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
        )
    return ok(f"shared memory: {how}")
