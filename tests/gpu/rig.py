"""Where the questions are put: a real device, or for a dry run the stub of the driver, whose figures mean nothing."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

import cuda_stub
from contract.arena_kinds import KINDS, TestedKind
from cuda_here import CudaHere
from gpu.actor import Actor
from kvharbor.gpumem import Device, Export, device_of
from kvharbor.gpumem.devices import memory_of
from kvharbor.gpumem.ipc_runtime import RUNTIME_VARIABLE

ARENAS = ("cuda_ipc", "cuda_vmm")


@contextlib.contextmanager
def closed_after(export: Export) -> Iterator[Export]:
    """Closes the descriptors that came with an export, which keep the memory as mappings do."""
    try:
        yield export
    finally:
        for fd in export.fds:
            os.close(fd)


@dataclass(frozen=True, slots=True)
class Rig:
    """The first device that this process sees, and other processes that see it too."""

    cuda: CudaHere
    on_hardware: bool

    @classmethod
    def hardware(cls, runtime: str) -> "Rig":
        """The real device; `runtime` makes the calls of CUDA IPC. Raises CudaUnavailable."""
        return cls(CudaHere.on_hardware(runtime), on_hardware=True)

    @classmethod
    def stub(cls) -> "Rig":
        """The stub, from now on the driver of this process."""
        return cls(CudaHere.stubbed(cuda_stub.preload()), on_hardware=False)

    @property
    def device(self) -> Device:
        """Where all memory lies."""
        return device_of(self.cuda.devices[0])

    def kind_name(self, arena: str) -> str:
        """Returns what the contract tests call an arena here."""
        if not self.on_hardware:
            return arena
        by_cupy = "_by_cupy" if arena == "cuda_ipc" and self.cuda.runtime == "cupy" else ""
        return f"{arena}{by_cupy}_on_hardware"

    def kind(self, arena: str) -> TestedKind:
        """Returns how an arena is read and written here."""
        return KINDS[self.kind_name(arena)]

    def actor(self) -> Actor:
        """Starts another process; the caller's to end."""
        return Actor.spawned({**self.cuda.environment, RUNTIME_VARIABLE: self.cuda.runtime})

    def free_bytes(self) -> int:
        """Returns how much of the device nobody has."""
        return memory_of(self.device).free_bytes

    def sized(self, on_hardware: int, on_stub: int) -> int:
        """Returns a size or a count: a dry run is to be quick, and the stub's devices are small."""
        return on_hardware if self.on_hardware else on_stub
