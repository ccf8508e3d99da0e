"""What to change where an arena could not be made, exported or opened."""

from typing import Final

from kvharbor.gpumem.allocator_settings import allocator_settings
from kvharbor.gpumem.errors import DeviceFailed, GpumemError

_OLD_DRIVER: Final = "cudaErrorCallRequiresNewerDriver"
_BY_CALL: Final = {
    "ipcgetmemhandle": "this device or driver exports no memory by CUDA IPC, as under WSL and on some virtual GPUs: "
    "use --arena cuda_vmm, or host",
    "ipcopenmemhandle": "let both processes see the same device, in one PID namespace (in a pod "
    "shareProcessNamespace: true), or use --arena cuda_vmm",
    "exporttoshareablehandle": "this device or driver exports no memory as file descriptors: use --arena cuda_ipc, "
    "or host",
    "importfromshareablehandle": "let both processes see the same device; in a container both need it assigned",
}
"""By a part of the failed call's name in small letters: CuPy's and the driver's differ in their beginning."""


def cause_and_remedy(failure: GpumemError) -> tuple[str, str]:
    """Returns what was wrong and what to change; the latter is empty where the error's text has all there is."""
    if isinstance(failure, DeviceFailed):
        return str(failure), _remedy_for(failure)
    remedy: str = getattr(failure, "remedy", "")
    return str(failure).removesuffix(f": {remedy}"), remedy


def _remedy_for(failure: DeviceFailed) -> str:
    if failure.out_of_memory:
        return "free some memory of the device: `nvidia-smi` shows who has it"
    if failure.code == _OLD_DRIVER:
        return "update the driver, or install CuPy for the CUDA that it speaks"
    suspects = allocator_settings()
    if suspects:
        return f"run without {', '.join(suspects)}: what such a setting allocates cannot be exported"
    called = failure.call.lower()
    for part, remedy in _BY_CALL.items():
        if part in called:
            return remedy
    return "look into `nvidia-smi` and the kernel's log for what is wrong with the device"
