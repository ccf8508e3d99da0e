"""Who connects: a process as the kernel vouches for it, and a descriptor that means this process and no other."""

import errno
import os
import select
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from kvharbor.server.descriptors import is_exhausted
from kvharbor.server.session_errors import PeerUnproven

SO_PEERPIDFD = 77
"""The socket option, which Python does not name yet (Linux 6.5): the pidfd of the process that connected."""

_CREDENTIALS = struct.Struct("3i")
_DESCRIPTOR = struct.Struct("i")


@dataclass(frozen=True, slots=True)
class Peer:
    """A process as the kernel vouches for it, with what the settings make of its user [S6]."""

    pid: int
    uid: int | None
    tenant: str
    administrator: bool


def credentials(connection: socket.socket) -> tuple[int, int]:
    """Returns pid and uid of the process that connected; pid 0 if this PID namespace does not have it."""
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def boot_time() -> float:
    """Returns seconds since boot, by the clock that the start times of processes are of."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def pidfd_of(connection: socket.socket, *, accepted_at: float) -> int:
    """Returns a pidfd of the process that connected, the caller's to close; raises PeerUnproven [S23].

    OSError where there is no descriptor left. `accepted_at` is the `boot_time` right after the accept.
    """
    try:
        (pidfd,) = _DESCRIPTOR.unpack(connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, _DESCRIPTOR.size))
    except OSError as failure:
        if is_exhausted(failure):
            raise
        pid, _ = credentials(connection)
        if failure.errno == errno.ENOPROTOOPT:
            return _pidfd_by_start_time(pid, accepted_at)
        raise PeerUnproven(pid, remedy=f"connect again, from a process that stays ({failure.strerror})") from None
    return int(pidfd)


def has_exited(pidfd: int) -> bool:
    """Tells whether every thread of the process has ended; its memory is unmapped by then."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def is_same_process(known: tuple[int, int], other: tuple[int, int]) -> bool:
    """Tells whether two (pidfd, pid) are of one process. Each pid is as the kernel gave it with a connection.

    The pid of a process that still lives is nobody else's. Where this PID namespace has no pid for it, the inode
    of its pidfd names it, on kernels that give each process one (Linux 6.9).
    """
    (known_pidfd, known_pid), (other_pidfd, other_pid) = known, other
    if has_exited(known_pidfd):
        return False
    if known_pid or other_pid:
        return known_pid == other_pid
    own_pidfd = os.pidfd_open(os.getpid())
    try:
        own, one, two = (os.fstat(pidfd).st_ino for pidfd in (own_pidfd, known_pidfd, other_pidfd))
    finally:
        os.close(own_pidfd)
    # Where all pidfds share one inode, that of this process is the same as well.
    return own != one == two


def _pidfd_by_start_time(pid: int, accepted_at: float) -> int:
    """Opens a pidfd by number, for kernels without the option: the process must be older than the connection."""
    if pid == 0:
        raise PeerUnproven(pid, remedy="share the service's PID namespace, or use Linux 6.5 or later")
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as failure:
        if is_exhausted(failure):
            raise
        raise PeerUnproven(pid, remedy=f"use Linux 6.5 or later ({failure.strerror})") from None
    try:
        started_at = _start_time(pid)
        # Alive after its start time was read: it was its own, and no successor's under the same number.
        if started_at is not None and started_at <= accepted_at and not has_exited(pidfd):
            return pidfd
    except BaseException:
        os.close(pidfd)
        raise
    os.close(pidfd)
    raise PeerUnproven(pid, remedy="connect from a process that is still there, and older than its connection")


def _start_time(pid: int) -> float | None:
    """Returns when a process was started, in seconds since boot; None if it is gone or /proc does not show it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    # The second field is the program's name in parentheses, which may hold anything.
    fields = stat.rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")
