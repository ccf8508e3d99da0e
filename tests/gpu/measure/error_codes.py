"""Which codes wrong uses of IPC handles get, by each runtime."""

import contextlib
import os
from collections.abc import Callable

from gpu.measure.outcomes import Outcomes
from gpu.measure.question import Answer, Figures
from gpu.rig import Rig
from kvharbor.gpumem import DeviceFailed, VmmArena, driver
from kvharbor.gpumem.devices import current
from kvharbor.gpumem.driver import IPC_HANDLE_BYTES
from kvharbor.gpumem.ipc_runtime import RUNTIMES, IpcRuntime, runtime_of

SIZE_BYTES = 4 << 20


def ask(rig: Rig) -> Answer:
    """Tries everything that must not work, and what is known to work in the end."""
    figures: Figures = {name: _tried(rig, runtime_of(name)) for name in (RUNTIMES if rig.on_hardware else ("driver",))}
    said = [f"{name}: " + ", ".join(f"{what} {code}" for what, code in seen.items()) for name, seen in figures.items()]
    return Answer("; ".join(said), figures)


def _tried(rig: Rig, runtime: IpcRuntime) -> Figures:
    device, tried = rig.device, Outcomes()

    def opened(handle: bytes) -> Callable[[], None]:
        return lambda: runtime.close(device, runtime.open(device, handle))

    def exported(address: int) -> Callable[[], object]:
        return lambda: runtime.handle_of(device, address)

    own = runtime.allocate(device, SIZE_BYTES)
    tried.call("open_in_the_exporting_process", opened(runtime.handle_of(device, own)))
    tried.call("open_zeros", opened(bytes(IPC_HANDLE_BYTES)))
    tried.call("open_noise", opened(os.urandom(IPC_HANDLE_BYTES)))
    tried.call("export_inside_an_allocation", exported(own + SIZE_BYTES // 2))
    runtime.free(device, own)
    tried.call("export_freed_memory", exported(own))
    with VmmArena.create(SIZE_BYTES, device) as arena, arena.map() as mapping:
        tried.call("export_vmm_memory", exported(mapping.address))
    if rig.on_hardware:
        _try_cupys_memory(rig, tried, exported)
    with rig.actor() as owner:
        export = owner.create(rig.kind_name("cuda_ipc"), SIZE_BYTES)
        owner.ask("reset")
        tried.call("open_freed_memory", opened(export.ipc_handle))
        export = owner.create(rig.kind_name("cuda_ipc"), SIZE_BYTES)
        tried.call("open_living_memory", opened(export.ipc_handle))
        owner.kill()
        tried.call("open_a_dead_exporters_memory", opened(export.ipc_handle))
    tried.call("error_left_behind", lambda: runtime.synchronise(device))
    return dict(tried.codes)


def _try_cupys_memory(rig: Rig, tried: Outcomes, exported: Callable[[int], Callable[[], object]]) -> None:
    """Memory of kinds that only CuPy makes for us."""
    import cupy

    with cupy.cuda.Device(rig.device.ordinal):
        for name, allocate in (
            ("export_async_pool_memory", cupy.cuda.MemoryAsyncPool().malloc),
            ("export_managed_memory", cupy.cuda.malloc_managed),
        ):
            memory = allocate(SIZE_BYTES)
            tried.call(name, exported(memory.ptr))
            with contextlib.suppress(DeviceFailed), current(rig.device):
                driver.context_synchronize()
            del memory
