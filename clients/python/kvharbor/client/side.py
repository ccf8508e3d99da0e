"""The side socket: its life is the session's life, and descriptors travel on it (see side.proto)."""

import contextlib
import errno
import io
import math
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kvharbor.client import frames, refusals
from kvharbor.client.errors import DeadlineExceeded, HarborClosed, HarborError, ServiceBug, SessionLost
from kvharbor.client.frames import Frame
from kvharbor.v1 import side_pb2

_TIMEVAL = struct.Struct("@ll")
_ONE_EVENT = struct.pack("=Q", 1)
_LOOK_AGAIN_S = 5.0
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 1.0


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

    def __init__(self, path: str, service: str | None = None) -> None:
        self._path = path
        self._service = service or path
        self._lock = threading.Lock()
        self.forked = False
        self.refused = False
        self._noticed_pools: dict[str, None] = {}
        with _forking:
            self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._noticed = io.FileIO(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK), "r+")
            _open_sockets.add(self)

    @classmethod
    def open(
        cls, path: str, hello: side_pb2.Hello, *, timeout_s: float, service: str | None = None
    ) -> tuple[Self, Session]:
        """Connects and opens a session, anew where the service's process ends before it has answered.

        `service` is what errors call it: the address that was given, where the caller has not named `path` itself.
        Raises ServiceUnreachable when nobody listens at `path` or this process may not connect, DeadlineExceeded
        after `timeout_s`, or what the service refuses the hello with.
        """
        until_s = time.monotonic() + timeout_s
        left_s, pause_s = timeout_s, _FIRST_PAUSE_S
        while True:
            side = cls.connect(path, timeout_s=left_s, service=service)
            try:
                session = side.hello(hello)
                side._connection.settimeout(timeout_s)
                return side, session
            except SessionLost:
                side.close()
                left_s = until_s - time.monotonic() - pause_s
                if side.refused or left_s <= 0:
                    raise
            except BaseException:
                side.close()
                raise
            # There may be no room for another session: that is not to be asked for without a pause.
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    @classmethod
    def connect(cls, path: str, *, timeout_s: float, service: str | None = None) -> Self:
        """Connects, and says nothing yet. While the service's process is being replaced the connection waits."""
        side = cls(path, service)
        try:
            side._connect(timeout_s)
        except BaseException:
            side.close()
            raise
        return side

    def _connect(self, timeout_s: float) -> None:
        # The kernel's own timeout: with Python's the socket does not block, and where many workers connect at
        # once a full backlog would be an error instead of a moment's wait.
        timeval = _TIMEVAL.pack(*divmod(math.ceil(timeout_s * 1e6), 10**6))
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
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
            raise refusals.unreachable(self._service, self._why(failure)) from None

    def _why(self, failure: OSError) -> object:
        if isinstance(failure, FileNotFoundError) and self._service != self._path and Path(self._service).is_socket():
            return f"{self._path} beside it is not there, and both are needed, as where their folder is shared"
        return failure.strerror or failure

    def hello(self, hello: side_pb2.Hello, *, patient: bool = False) -> Session:
        """Opens or resumes a session. `patient`: waits for the answer until the socket ends, here or there."""
        if patient:
            timeout_s = self._connection.gettimeout()
            self._connection.settimeout(None)
        frame = self._exchange(side_pb2.SideRequest(hello=hello))
        if patient:
            self._connection.settimeout(timeout_s)
        frames.close_fds(frame.fds)
        if frame.response.WhichOneof("response") != "welcome":
            raise ServiceBug("the service answered a hello with something else than a welcome")
        welcome = frame.response.welcome
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

    def attach(self, attach: side_pb2.Attach) -> tuple[side_pb2.Attached, tuple[int, ...]]:
        """Returns what is said of a part of a pool, and the descriptors of its memory, which become the caller's.

        Raises what the service refuses it with; OSError (EMFILE) where this process may open no more descriptors.
        """
        frame = self._exchange(side_pb2.SideRequest(attach=attach))
        attached = frame.response.attached
        if frame.response.WhichOneof("response") != "attached" or attached.part != attach.part or frame.cut:
            frames.close_fds(frame.fds)
            if frame.cut and len(frame.fds) < frames.MAX_DESCRIPTORS:
                raise OSError(errno.EMFILE, "no descriptor is left for the pool's memory: raise RLIMIT_NOFILE")
            raise ServiceBug(f"the service answered an attach without the memory of part {attach.part}")
        return attached, frame.fds

    def attach_status(self, pool_id: str) -> int:
        """Returns the descriptor of a pool's status page, which becomes the caller's, or raises as `attach` does."""
        frame = self._exchange(side_pb2.SideRequest(attach_status=side_pb2.AttachStatus(pool_id=pool_id)))
        if frame.response.WhichOneof("response") != "status_attached" or len(frame.fds) != 1:
            frames.close_fds(frame.fds)
            if frame.cut:
                raise OSError(errno.EMFILE, "no descriptor is left for the pool's status page: raise RLIMIT_NOFILE")
            raise ServiceBug("the service answered for a status page without one")
        return frame.fds[0]

    def take_notices(self) -> list[str]:
        """Returns the pools that the service has noticed warm tasks of since the last call; does not wait."""
        with self._lock, self._failing():
            while self._polled(select.POLLIN):
                frame = frames.receive(self._connection)
                if not self._keep_notice(frame):
                    frames.close_fds(frame.fds)
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

    def _exchange(self, request: side_pb2.SideRequest) -> Frame:
        with self._lock, self._failing():
            # A service that refuses before it has read the request has closed its end: its answer is there.
            with contextlib.suppress(BrokenPipeError):
                self._connection.sendall(frames.framed(request))
            frame = frames.receive(self._connection)
            while self._keep_notice(frame):
                frame = frames.receive(self._connection)
        if frame.response.WhichOneof("response") == "refused":
            frames.close_fds(frame.fds)
            self.refused = True
            raise refusals.from_refused(frame.response.refused)
        return frame

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
        except EOFError:
            raise self._lost("closed by the service") from None
        except ValueError:  # of a descriptor that is closed
            raise self._lost("closed here") from None
        except OSError as failure:
            raise self._lost(failure.strerror or str(failure)) from None

    def _keep_notice(self, frame: Frame) -> bool:
        """Keeps what is a notice, and says whether it was one."""
        if frame.response.WhichOneof("response") != "warm_tasks_pending":
            return False
        frames.close_fds(frame.fds)
        self._noticed_pools[frame.response.warm_tasks_pending.pool_id] = None
        self._noticed.write(_ONE_EVENT)
        return True

    def _polled(self, events: int, timeout_s: float = 0.0) -> int:
        """Returns which of the events, an error or the end there is on the socket within `timeout_s`."""
        poll = select.poll()
        poll.register(self._connection, events)
        return next((found for _, found in poll.poll(timeout_s * 1000)), 0)

    def _lost(self, cause: str) -> HarborError:
        return SessionLost(f"the session's socket {self._path} has ended ({cause}): connect again")


_open_sockets: "weakref.WeakSet[SideSocket]" = weakref.WeakSet()
# A fork waits for a socket that is just being made: a copy that nobody knows of would keep the session alive.
_forking = threading.Lock()


def _close_inherited() -> None:
    _forking.release()
    for side in list(_open_sockets):
        side._close_in_child()


os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_close_inherited)
