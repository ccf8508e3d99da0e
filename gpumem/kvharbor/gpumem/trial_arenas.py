"""Small arenas of every kind, made as the service makes them, for the two-process test."""

import contextlib
from collections.abc import Iterator
from typing import Final

from kvharbor.gpumem.arena import ArenaKind, Export
from kvharbor.gpumem.cuda_ipc import IpcArena
from kvharbor.gpumem.cuda_vmm import VmmArena
from kvharbor.gpumem.devices import device_of
from kvharbor.gpumem.host import HostArena
from kvharbor.gpumem.ipc_runtime import runtime_of
from kvharbor.gpumem.stamps import DevicePlace, StampPlace, place_in

SIZE_BYTES: Final = 4 * 2**20
"""Two chunks of physical device memory, whose granularity is 2 MiB as a rule."""


@contextlib.contextmanager
def trial_arena(kind: ArenaKind, device: str, runtime: str | None) -> Iterator[tuple[Export, StampPlace]]:
    """Yields what another process needs to map the arena, and the place of its stamp in this one.

    `device` is a UUID, "" for the host. By the end of the context no other process may have the arena open. Raises
    what making an arena and, in this process, mapping it can raise.
    """
    with contextlib.ExitStack() as stack:
        match kind:
            case ArenaKind.HOST:
                host = stack.enter_context(HostArena.create(SIZE_BYTES, name="kvharbor-trial"))
                host.reserve()
                yield host.export(), place_in(stack.enter_context(host.map()))
            case ArenaKind.CUDA_VMM:
                vmm = stack.enter_context(VmmArena.create(SIZE_BYTES, device_of(device)))
                yield vmm.export(), place_in(stack.enter_context(vmm.map()))
            case ArenaKind.CUDA_IPC:
                # Not mapped: its own process has the memory already, and must not open the handle.
                ipc = stack.enter_context(IpcArena.create(SIZE_BYTES, device_of(device), runtime_of(runtime)))
                yield ipc.export(), DevicePlace.at_end(ipc.device, ipc.address, ipc.size_bytes)
