"""Threads for work that must not run on the event loop: one piece after the other, and one thread a device."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from kvharbor.gpumem import DeviceFailed, InsufficientMemory, driver
from kvharbor.server.supervision.crash import Crash

T = TypeVar("T")


class WorkThread:
    """A thread that does what it is given, in order. It begins with the first piece, and ends with `close`."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Has it done, without waiting for it."""
        return self._executor.submit(work)

    async def run(self, work: Callable[[], T]) -> T:
        """Has it done after what was given before, and returns its result. Cancelled before its turn it is not done."""
        return await asyncio.wrap_future(self.submit(work))

    def close(self) -> None:
        """Takes no more work; what was given is still done."""
        self._executor.shutdown(wait=False)


class DeviceThread(WorkThread):
    """The one thread of this process that calls a device [S25].

    A device that fails is taken for broken, and the process with it: what its memory holds is not known any more, and
    the driver answers nothing sensible from then on. Want of memory is a failure like others, except where the work
    itself has made a refusal of it (`refusing_for_room`).
    """

    def __init__(self, uuid: str, crash: Crash) -> None:
        super().__init__(f"device-{uuid}")
        self.uuid = uuid
        self._crash = crash
        self._stream: int | None = None

    def stream(self) -> int:
        """Returns the stream of all its copies. To be called on the thread, in the device's context."""
        if self._stream is None:
            self._stream = driver.stream_create()
        return self._stream

    async def run(self, work: Callable[[], T]) -> T:
        """As WorkThread does; ends the process where the device fails."""
        try:
            return await super().run(work)
        except DeviceFailed as failure:
            self._crash(failure)
            raise


@contextlib.contextmanager
def refusing_for_room(uuid: str, needed_bytes: int, remedy: str) -> Iterator[None]:
    """Makes InsufficientMemory of a device's want of memory.

    For work that is undone as a whole when one of its calls fails.
    """
    try:
        yield
    except DeviceFailed as failure:
        if not failure.out_of_memory:
            raise
        limited_by = f"device {uuid} ({failure.call})"
        raise InsufficientMemory(needed_bytes, available_bytes=0, limited_by=limited_by, remedy=remedy) from None
