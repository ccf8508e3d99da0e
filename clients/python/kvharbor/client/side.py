"""The side socket: its life is the session's life, and descriptors travel on it (see side.proto).

A frame is the length of its message as a little-endian uint32, then the message.
"""

import contextlib
import io
import math
import os
import select
import socket
import struct
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from google.protobuf.message import DecodeError

from kvharbor.client import refusals
from kvharbor.client.errors import DeadlineExceeded, HarborClosed, HarborError, ServiceBug, SessionLost
from kvharbor.v1 import side_pb2, types_pb2

MAX_FRAME_BYTES = 64 * 1024
_LENGTH = struct.Struct("<I")
_TIMEVAL = struct.Struct("@ll")
_ONE_EVENT = struct.pack("=Q", 1)
_LOOK_AGAIN_S = 5.0


@dataclass(frozen=True, slots=True)
class Session:
    """What the service calls this session, and whom it takes it for.

    `token` is the leader's; another member has an empty one. `resume_token` is what either goes on with.
    """

    session_id: str
    token: str
    epoch: str
    tenant: str
    server_version: str
    join_token: str = ""
    resume_token: str = ""
    opened_pool_ids: tuple[str, ...] = ()


class SideSocket:
    """An open session. Ends it when closed, or when the process ends; made by `open`.

    A forked child closes its copy at once: a session must not live on in a process that does not know of it.
    Threads may share it. Whoever reads keeps the notices that come between answers; the event descriptor is
    readable while there are any, for those who wait for one. `refused`: the last request was, by the service. `forked`:
    this process is a fork of the one that opened it.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self.forked = False
        self.refused = False
        self._noticed_pools: dict[str, None] = {}
        with _forking:
            self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._noticed = io.FileIO(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK), "r+")
            _open_sockets.add(self)

    @classmethod
    def open(cls, path: str, hello: side_pb2.Hello, *, timeout_s: float) -> tuple[Self, Session]:
        """Connects and opens a session.

        Raises ServiceUnreachable when nobody listens at `path` or this process may not connect, DeadlineExceeded,
        or what the service refuses the hello with.
        """
        side = cls.connect(path, timeout_s=timeout_s)
        try:
            return side, side.hello(hello)
        except BaseException:
            side.close()
            raise

    @classmethod
    def connect(cls, path: str, *, timeout_s: float) -> Self:
        """Connects, and says nothing yet. While the service's process is being replaced the connection waits."""
        side = cls(path)
        try:
            side._connect(timeout_s)
        except BaseException:
            side.close()
            raise
        return side

    def _connect(self, timeout_s: float) -> None:
        # The kernel's own timeout: with Python's the socket does not block, and where many workers connect at
        # once a full backlog would be an error instead of a moment's wait.
        whole_s = int(timeout_s)
        self._connection.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(whole_s, math.ceil((timeout_s - whole_s) * 1e6))
        )
        try:
            self._connection.connect(self._path)
            self._connection.settimeout(timeout_s)
        except BlockingIOError:
            raise DeadlineExceeded(
                f"{self._path} took no connection in {timeout_s:g} s: the service is overloaded"
            ) from None
        except PermissionError:
            raise refusals.forbidden(self._path) from None
        except OSError as failure:
            raise refusals.unreachable(self._path, failure.strerror or failure) from None

    def hello(self, hello: side_pb2.Hello, *, patient: bool = False) -> Session:
        """Opens or resumes a session. `patient`: waits for the answer until the socket ends, here or there."""
        if patient:
            timeout_s = self._connection.gettimeout()
            self._connection.settimeout(None)
        response, fd = self._exchange(side_pb2.SideRequest(hello=hello))
        if patient:
            self._connection.settimeout(timeout_s)
        _close_fd(fd)
        if response.WhichOneof("response") != "welcome":
            raise ServiceBug("the service answered a hello with something else than a welcome")
        welcome = response.welcome
        return Session(
            session_id=welcome.session_id,
            token=welcome.session_token,
            epoch=welcome.epoch,
            tenant=welcome.tenant,
            server_version=welcome.server_version,
            join_token=welcome.join_token,
            resume_token=welcome.session_token or welcome.member_token,
            opened_pool_ids=tuple(welcome.opened_pool_ids),
        )

    def attach(self, pool_id: str) -> tuple[types_pb2.PoolDescriptor, int]:
        """Returns a pool's descriptor and the file descriptor of its memory, which becomes the caller's."""
        request = side_pb2.SideRequest(attach=side_pb2.Attach(pool_id=pool_id))
        response, fd = self._exchange(request)
        if response.WhichOneof("response") != "attached" or fd is None:
            _close_fd(fd)
            raise ServiceBug("the service answered an attach without the pool's memory")
        return response.attached.descriptor, fd

    def take_notices(self) -> list[str]:
        """Returns the pools that the service has noticed warm tasks of since the last call; does not wait."""
        with self._lock, self._failing():
            while self._polled(select.POLLIN):
                response, fd = self._receive()
                if not self._keep_notice(response):
                    _close_fd(fd)
                    raise ServiceBug("the service sent an answer that nothing had asked for")
            taken = [*self._noticed_pools]
            self._noticed_pools.clear()
            self._noticed.read(len(_ONE_EVENT))
        return taken

    def wait_for_notice(self, timeout_s: float) -> None:
        """Waits until `take_notices` may have something, the session has ended, or `timeout_s` is over."""
        poll = select.poll()
        with contextlib.suppress(ValueError):  # closed here
            for source in self.notice_sources:
                poll.register(source, select.POLLIN)
            poll.poll(math.ceil(timeout_s * 1000))

    @property
    def notice_sources(self) -> tuple[int, int]:
        """Descriptors one of which is readable when `take_notices` may have something; ValueError once closed."""
        return self._noticed.fileno(), self._connection.fileno()

    def wait_for_end(self) -> None:
        """Waits until the other end is gone or the socket is ended here, whatever there still is to be read."""
        # Looks again now and then: the number of a socket that was closed meanwhile may be another file's by now.
        with contextlib.suppress(ValueError):
            while not self._polled(select.POLLRDHUP, _LOOK_AGAIN_S):
                pass

    @property
    def lost(self) -> bool:
        """Whether the other end is gone: the service's process has ended, or it has ended the session."""
        try:
            return bool(self._polled(select.POLLRDHUP))
        except ValueError:  # closed here
            return True

    def require_same_process(self) -> None:
        """Raises HarborClosed in a fork of the process that opened the session."""
        if self.forked:
            raise HarborClosed("the harbor was opened by the parent of this process: connect again after a fork")

    def end(self) -> None:
        """Ends the socket for the service and for threads that wait here; its descriptors stay until `close`."""
        with contextlib.suppress(OSError):  # closed before, here or by the service
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the socket, also for a thread that waits for a notice; repeated calls do nothing."""
        self.end()
        self._close_descriptors()

    def _close_in_child(self) -> None:
        # No shutdown: that would end the parent's session.
        self.forked = True
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        self._connection.close()
        self._noticed.close()

    def _exchange(self, request: side_pb2.SideRequest) -> tuple[side_pb2.SideResponse, int | None]:
        payload = request.SerializeToString()
        with self._lock, self._failing():
            # A service that refuses before it has read the request has closed its end: its answer is there.
            with contextlib.suppress(BrokenPipeError):
                self._connection.sendall(_LENGTH.pack(len(payload)) + payload)
            response, fd = self._receive()
            while self._keep_notice(response):
                response, fd = self._receive()
        if response.WhichOneof("response") == "refused":
            _close_fd(fd)
            self.refused = True
            raise refusals.from_refused(response.refused)
        return response, fd

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Turns what goes wrong with the socket into the client's errors."""
        try:
            yield
        except TimeoutError:
            # A late answer would be taken for that of the next request.
            self.close()
            raise DeadlineExceeded(
                f"no answer on {self._path} in {self._connection.gettimeout():g} s: the session is closed, "
                f"connect again"
            ) from None
        except ValueError:  # of a descriptor that is closed
            raise self._lost("closed here") from None
        except OSError as failure:
            raise self._lost(failure.strerror or str(failure)) from None

    def _keep_notice(self, response: side_pb2.SideResponse) -> bool:
        """Keeps what is a notice, and says whether it was one."""
        if response.WhichOneof("response") != "warm_tasks_pending":
            return False
        self._noticed_pools[response.warm_tasks_pending.pool_id] = None
        self._noticed.write(_ONE_EVENT)
        return True

    def _polled(self, events: int, timeout_s: float = 0.0) -> int:
        """Returns which of the events, an error or the end there is on the socket within `timeout_s`."""
        poll = select.poll()
        poll.register(self._connection, events)
        return next((found for _, found in poll.poll(timeout_s * 1000)), 0)

    def _receive(self) -> tuple[side_pb2.SideResponse, int | None]:
        head, ancillary, _, _ = self._connection.recvmsg(
            _LENGTH.size, socket.CMSG_SPACE(struct.calcsize("i")), socket.MSG_CMSG_CLOEXEC
        )
        fds = [
            struct.unpack("i", data[: struct.calcsize("i")])[0]
            for level, kind, data in ancillary
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        ]
        fd = fds[0] if fds else None
        try:
            length = _LENGTH.unpack(head + self._read(_LENGTH.size - len(head), after=head))[0]
            if length > MAX_FRAME_BYTES:
                raise ServiceBug(f"a frame of {length} bytes, at most {MAX_FRAME_BYTES} are allowed")
            return side_pb2.SideResponse.FromString(self._read(length, after=head)), fd
        except DecodeError:
            _close_fd(fd)
            raise ServiceBug("a frame that is no SideResponse") from None
        except BaseException:
            _close_fd(fd)
            raise

    def _read(self, size_bytes: int, *, after: bytes) -> bytes:
        if not after:
            raise self._lost("closed by the service")
        received = bytearray()
        while len(received) < size_bytes:
            piece = self._connection.recv(size_bytes - len(received))
            if not piece:
                raise self._lost("closed by the service")
            received += piece
        return bytes(received)

    def _lost(self, cause: str) -> HarborError:
        return SessionLost(f"the session's socket {self._path} has ended ({cause}): connect again")


def _close_fd(fd: int | None) -> None:
    if fd is not None:
        os.close(fd)


_open_sockets: "weakref.WeakSet[SideSocket]" = weakref.WeakSet()
# A fork waits for a socket that is just being made: a copy that nobody knows of would keep the session alive.
_forking = threading.Lock()


def _close_inherited() -> None:
    _forking.release()
    for side in list(_open_sockets):
        side._close_in_child()


os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_close_inherited)
