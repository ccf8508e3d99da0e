"""Order between the work of a device and the calls about it [C14].

Kernels run some time after the call that has launched them. But another process may read a block from the moment
that Commit returns, and the next owner may write to it from the moment that Release does. So both wait for the
device first, in the process that knows its streams: an event shared between processes would be lighter, but CUDA
has bugs in what becomes of such events.
"""

import sys
from collections.abc import Callable
from typing import Any, Protocol

from kvharbor.client import devices
from kvharbor.gpumem import Device

Wait = Callable[[], object]
"""Waits for what was marked, in any thread. What it raises keeps the call from being made."""
Mark = Callable[[], Wait | None]
"""A method of a StreamOrder."""


class StreamOrder(Protocol):
    """What has to be done on a device before this process says something of its blocks.

    Both methods are called in the thread that makes the call of the pool, and return at once what waits for the
    work, or None where there is none. asyncio waits in another thread, whose current stream is not the caller's:
    so take the stream or record the event first, and return e.g. `event.synchronize`.
    """

    def before_commit(self) -> Wait | None:
        """Marks the work that writes: before commit, hand-off and fork, whose copy the service makes."""

    def before_release(self) -> Wait | None:
        """Marks all work on the blocks: before release and hand-off, and of all sequences before close."""


class NoOrder:
    """Waits for nothing: for host memory, which is written when the store returns, and for who waits himself."""

    def before_commit(self) -> Wait | None:
        """Marks nothing."""
        return None

    def before_release(self) -> Wait | None:
        """Marks nothing."""
        return None


class DeviceOrder:
    """Waits for torch's current stream of the calling thread on `device`, as far as it is filled by then.

    Where torch does not use CUDA in this process, waits for all work of the process on the device. Neither was seen
    on hardware.
    """

    def __init__(self, device: Device) -> None:
        self.device = device

    def before_commit(self) -> Wait | None:
        """Marks the work of the current stream."""
        return self._marked()

    def before_release(self) -> Wait | None:
        """Marks the work of the current stream."""
        return self._marked()

    def _marked(self) -> Wait:
        # Never imported for this: what is not loaded has launched nothing.
        torch: Any = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            # torch counts devices as the driver does.
            event = torch.cuda.current_stream(self.device.ordinal).record_event()
            return event.synchronize  # type: ignore[no-any-return]
        return self._synchronize

    def _synchronize(self) -> None:
        devices.synchronize(self.device)


NO_ORDER = NoOrder()


def wait_for(*marked: Wait | None) -> None:
    """Waits for what a StreamOrder has marked."""
    for wait in marked:
        if wait is not None:
            wait()
