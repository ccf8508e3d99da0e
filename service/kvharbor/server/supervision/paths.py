"""Who owns a socket path, and how a socket appears there.

gRPC alone takes over the path of a running server without a word, and whoever of the two stops first
deletes it for both. So [S5] a lock file beside the socket, locked for life, decides who owns the path; and gRPC
never sees the path itself: a socket is bound under a private name, gets its mode and group, and is renamed.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import socket
import stat
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import structlog

from kvharbor.server.errors import StartupError

log = structlog.get_logger(__name__)

T = TypeVar("T")

PATIENCE_S = 5.0
"""How long a start waits for the children of a supervisor that was killed."""
_POLL_S = 0.02

MAX_PATH_BYTES = 107
"""The kernel's limit for a Unix socket's path."""


@dataclass(frozen=True, slots=True)
class SocketPaths:
    """The files of one service: absolute paths of the gRPC socket and of what lies beside it."""

    grpc: Path
    side: Path
    lock: Path
    port: Path


@dataclass(frozen=True, slots=True)
class SocketAccess:
    """Who may connect: a file mode, and a group by name or None."""

    mode: int
    group: str | None


def socket_paths(path: str) -> SocketPaths:
    """Returns the paths that belong to the gRPC socket `path`; a relative one counts from the working directory.

    Raises StartupError when a socket's path is longer than the kernel takes.
    """
    # Clients write "unix:/path", and KVHARBOR_SOCKET is for both.
    grpc = Path(os.path.abspath(path.removeprefix("unix:")))  # noqa: PTH100 - resolve() would follow a link at the path itself
    side = Path(str(grpc).removesuffix(".sock") + ".side")
    # Whole names: "poetry.sock" must not claim "poetry.lock".
    paths = SocketPaths(grpc, side, lock=Path(f"{grpc}.lock"), port=Path(f"{grpc}.port"))
    for each in (paths.grpc, paths.side):
        length = len(os.fsencode(each))
        if length > MAX_PATH_BYTES:
            raise StartupError(
                f"the socket path {each} has {length} bytes, at most {MAX_PATH_BYTES} are possible: "
                f"choose a shorter one"
            )
    return paths


@contextlib.contextmanager
def claimed(paths: SocketPaths, *, patience_s: float = PATIENCE_S) -> Iterator[int]:
    """Owns the paths while the context lasts, and leaves none of them behind; yields the lock's descriptor.

    Whoever inherits the descriptor shares in owning the paths: nobody else gets them until its last copy is closed.
    Sockets of a dead service are taken away. Raises StartupError, with nothing changed, when another service lives
    there, when children of a dead one are not gone after `patience_s`, when something else than a socket lies there,
    or when the directory does not serve.
    """
    _require_directory(paths.grpc)
    for each in (paths.grpc, paths.side):
        _require_replaceable(each)
    with contextlib.ExitStack() as undo:
        # A signal between making the file and knowing of it would leave it behind.
        with _signals(signal.SIG_BLOCK):
            lock = _locked(paths, patience_s)
            undo.callback(os.close, lock)
            # Unlinked while still held: whoever opened it meanwhile sees that it locked a dead file.
            undo.callback(paths.lock.unlink, missing_ok=True)
        for each in (paths.grpc, paths.side):
            _require_unserved(each)
        # Only from here on is what lies at these paths ours to remove.
        _unlink(paths)
        undo.callback(_unlink, paths)
        yield lock


def bind_published(path: Path, access: SocketAccess, bind: Callable[[str], T]) -> T:
    """Calls `bind` with a private name, sets mode and group of the socket it makes, and moves it to `path`.

    The private name goes through a directory descriptor, so it is short whatever the path's length, and
    does not exist any more when gRPC unlinks it at its end. The caller owns the path, see `claimed`.
    """
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    made = _private(path)
    made.unlink(missing_ok=True)
    previous = os.umask(0o177)
    try:
        bound = bind(f"/proc/self/fd/{directory}/{made.name}")
    finally:
        os.umask(previous)
        os.close(directory)
    try:
        if access.group is not None:
            _set_group(made, access.group)
        made.chmod(access.mode)
        made.rename(path)
    except BaseException:
        made.unlink(missing_ok=True)
        raise
    return bound


def listen_side(paths: SocketPaths, access: SocketAccess) -> socket.socket:
    """Returns the listening side socket, the caller's to close."""

    def bind(name: str) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(name)
            # Beyond the backlog a Unix client is not made to wait but fails: a host's workers may start at once.
            listener.listen(socket.SOMAXCONN)
        except BaseException:
            listener.close()
            raise
        return listener

    return bind_published(paths.side, access, bind)


def _private(path: Path) -> Path:
    """The name under which a socket for `path` is made: one, so that what a crash leaves is found and replaced."""
    return path.with_name(f".{zlib.crc32(os.fsencode(path.name)):08x}.new")


def _set_group(path: Path, group: str) -> None:
    try:
        shutil.chown(path, group=int(group) if group.isdecimal() else group)
    except PermissionError:
        raise StartupError(
            f"the sockets cannot get the group {group!r}: start as root or as a member of that group"
        ) from None


def _require_directory(path: Path) -> None:
    parent = path.parent
    if not parent.exists():
        raise StartupError(f"the directory {parent} of the socket does not exist: create it or set another socket")
    if not parent.is_dir():
        raise StartupError(f"{parent}, where the socket shall be, is no directory: set another socket")
    mode = parent.stat().st_mode
    # Not refused: the shared volume of a pod is like that, and has no other users.
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        log.warning(
            "any user may replace the sockets",
            directory=str(parent),
            mode=f"{stat.S_IMODE(mode):04o}",
            remedy="set the sticky bit (chmod +t), or let only those write who serve",
        )


def _require_replaceable(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as failure:
        raise StartupError(f"cannot use the socket path {path}: {failure.strerror}") from None
    if not stat.S_ISSOCK(mode):
        raise StartupError(f"{path} exists and is no socket: remove it or set another socket")


def _locked(paths: SocketPaths, patience_s: float) -> int:
    """Returns the lock file, locked twice.

    The record lock is its process's alone and tells whether a supervisor lives. The other is shared with its
    children: they may outlive it, by the moments that the kernel takes to end them.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            lock = os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as failure:
            raise StartupError(f"cannot create {paths.lock} beside the socket: {failure.strerror}") from None
        try:
            if not _try_lock(fcntl.lockf, lock, paths.lock):
                raise StartupError(f"another kvharbor serves {paths.grpc}: stop it or set another socket")
            while not _try_lock(fcntl.flock, lock, paths.lock):
                if time.monotonic() >= deadline:
                    raise StartupError(
                        f"another kvharbor serves {paths.grpc}, or what is left of one that was killed: "
                        f"stop it or set another socket"
                    )
                with _signals(signal.SIG_UNBLOCK):
                    time.sleep(_POLL_S)
            if _is_at(lock, paths.lock):
                return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


@contextlib.contextmanager
def _signals(how: int) -> Iterator[None]:
    """Blocks or unblocks what may ask this process to stop, and leaves it as it was."""
    before = signal.pthread_sigmask(how, (signal.SIGTERM, signal.SIGINT))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _try_lock(lock: Callable[[int, int], None], descriptor: int, path: Path) -> bool:
    try:
        lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as failure:
        if failure.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise StartupError(f"cannot lock {path}: {failure.strerror}") from None
        return False
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Tells whether the open file is still the one at `path`: its last owner may just have unlinked it."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _require_unserved(path: Path) -> None:
    """Raises StartupError when a program that knows nothing of our lock listens at `path`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return
        except OSError as failure:
            cause = failure.strerror or str(failure)
            raise StartupError(f"cannot use the socket path {path}: {cause}") from None
    raise StartupError(f"another program listens at {path}: stop it or set another socket")


def _unlink(paths: SocketPaths) -> None:
    for each in (paths.grpc, paths.side, _private(paths.grpc), _private(paths.side), paths.port):
        each.unlink(missing_ok=True)
