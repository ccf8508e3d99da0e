"""What an Actor runs."""

import contextlib
import socket
import sys
from collections.abc import Iterator
from typing import cast

from contract.peer_process import Session, serve
from gpu.writers import Load, start_kernel, start_thread, store_by_kernel
from kvharbor.gpumem import ArenaKind, DeviceFailed, DeviceMapped, driver
from kvharbor.gpumem.devices import current


class ActorSession(Session):
    """Each method is a command."""

    def start_writing(self, load: Load) -> int:
        """Keeps storing the time into the mapped arena; returns into how many slots."""
        assert self.mapped is not None
        return start_kernel(self._on_device, load) if self.kind.on_hardware else start_thread(self.mapped)

    def store_by_kernel(self) -> None:
        """Stores into the first byte by a kernel."""
        if not self.kind.on_hardware:
            self.store()
            return
        with _cupy_failures():
            store_by_kernel(self._on_device)

    def use_device(self) -> None:
        """Does something on the device that has nothing to do with the arena."""
        with current(self._on_device.device):
            driver.mem_free(driver.mem_alloc(1 << 20))
            driver.context_synchronize()

    @property
    def _on_device(self) -> DeviceMapped:
        assert self.mapped is not None
        assert self.mapped.kind is not ArenaKind.HOST
        return cast(DeviceMapped, self.mapped)


@contextlib.contextmanager
def _cupy_failures() -> Iterator[None]:
    """Raises CuPy's errors as ours."""
    import cupy

    try:
        yield
    except cupy.cuda.runtime.CUDARuntimeError as failure:
        code, _, detail = str(failure).partition(": ")
        raise DeviceFailed("a kernel", code, detail) from failure


if __name__ == "__main__":
    with contextlib.closing(socket.socket(fileno=int(sys.argv[1]))) as inherited:
        serve(inherited, ActorSession())
