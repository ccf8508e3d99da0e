"""This process's CUDA IPC handles: those that it has exported, and those that it has open, each once.

A handle names a whole allocation. What a second opening of it in one process returns, and how many closings that
needs, depends on the driver's version: so the first user opens it, the others share the address, and the last one
closes it [M13].
"""

import os
import threading
from collections import deque
from dataclasses import dataclass

from kvharbor.gpumem.devices import Device
from kvharbor.gpumem.ipc_runtime import IpcRuntime


@dataclass(slots=True, eq=False)
class OpenHandle:
    """An allocation of another process that is mapped at `address` as long as it has users."""

    device: Device
    handle: bytes
    runtime: IpcRuntime
    address: int
    user_count: int = 0


class IpcHandles:
    """The table of one process. Calls may come from any thread."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Empties the table and closes nothing: what a forked child does, in which CUDA is dead."""
        self._changing = threading.Lock()
        self._exported: set[bytes] = set()
        self._open: dict[tuple[str, bytes], OpenHandle] = {}
        self._abandoned: deque[OpenHandle] = deque()

    def add_exported(self, handle: bytes) -> None:
        """Notes a handle of this process's own memory, which it must not open. No later memory gets the same one."""
        self._exported.add(handle)

    def has_exported(self, handle: bytes) -> bool:
        """Whether the handle names memory of this process, or has done so."""
        return handle in self._exported

    def open(self, device: Device, handle: bytes, runtime: IpcRuntime) -> OpenHandle:
        """Opens the handle, or shares it with those who have it open; one `close` is due for each call."""
        with self._changing:
            opened = self._open.get((device.uuid, handle))
            if opened is None:
                opened = OpenHandle(device, handle, runtime, runtime.open(device, handle))
                self._open[device.uuid, handle] = opened
            opened.user_count += 1
        self._close_abandoned()
        return opened

    def close(self, opened: OpenHandle) -> None:
        """Ends one use. The last one waits for this process's work on the device, and unmaps the memory."""
        with self._changing:
            self._end_use(opened)
        self._close_abandoned()

    def abandon(self, opened: OpenHandle) -> None:
        """Does what `close` does, now or in the next call: for finalizers, which may run in the midst of one."""
        self._abandoned.append(opened)
        self._close_abandoned()

    def _close_abandoned(self) -> None:
        # Whoever has the lock comes by here after it, so that what is not closed now is closed then.
        while self._abandoned and self._changing.acquire(blocking=False):
            try:
                while self._abandoned:
                    self._end_use(self._abandoned.popleft())
            finally:
                self._changing.release()

    def _end_use(self, opened: OpenHandle) -> None:
        key = (opened.device.uuid, opened.handle)
        if self._open.get(key) is not opened:
            return  # opened before a fork, by the parent
        opened.user_count -= 1
        if opened.user_count == 0:
            del self._open[key]
            # Kernels and copies that are queued may still read or write it.
            opened.runtime.synchronise(opened.device)
            opened.runtime.close(opened.device, opened.address)


HANDLES = IpcHandles()
os.register_at_fork(after_in_child=HANDLES.forget)
