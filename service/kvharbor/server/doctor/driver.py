"""The CUDA driver: its kernel module, its library, and whether CuPy's CUDA runs on it."""

from collections.abc import Iterator
from pathlib import Path

from kvharbor.gpumem import CudaUnavailable, driver
from kvharbor.gpumem.arena import ArenaKind
from kvharbor.gpumem.cupy_runtime import cuda_version_of_cupy
from kvharbor.server.doctor.check import NO_ARENA, ON_DEVICES, Check, Outcome, fail, lacking, ok, skipped
from kvharbor.server.doctor.place import Place
from kvharbor.server.doctor.surroundings import Surroundings

GIVE_DEVICES = {
    Place.HOST: "install the driver of NVIDIA on this machine",
    Place.CONTAINER: "start the container with its devices (docker run --gpus all, with the NVIDIA Container Toolkit)",
    Place.POD: "let the pod have devices: resources.limits nvidia.com/gpu or a resource claim, one that the service's "
    "container and the workers' share",
}
"""By place, how a process comes to see devices."""


def checks(around: Surroundings) -> Iterator[Check]:
    """Yields the checks of this topic."""
    yield Check("driver.module", lambda: _module(around.root))
    yield Check("driver.api", lambda: _api(around), ON_DEVICES)
    by_cupy = around.settings.cuda_runtime == "cupy"
    yield Check("driver.for_cupy", _for_cupy, frozenset({ArenaKind.CUDA_IPC}) if by_cupy else NO_ARENA)


def _module(root: Path) -> Outcome:
    try:
        version = (root / "proc/driver/nvidia/version").read_text()
    except FileNotFoundError:
        return skipped("the kernel shows no module of NVIDIA")
    return ok(" ".join(version.splitlines()[0].split()))


def _api(around: Surroundings) -> Outcome:
    try:
        driver.bindings()
    except CudaUnavailable as unavailable:
        # Nothing is known of the driver then: giving the container devices would not mend it.
        return skipped(f"{unavailable.cause}, see packages.cuda_bindings")
    try:
        driver.init()
    except CudaUnavailable as unavailable:
        remedy = GIVE_DEVICES[around.place]
        if around.does_without_devices:
            return lacking(unavailable.cause, remedy)
        return fail(unavailable.cause, f"{remedy}; or use --arena host")
    major, minor = driver.driver_version()
    return ok(f"CUDA {major}.{minor}")


def _for_cupy() -> Outcome:
    try:
        driver.init()
        needed = cuda_version_of_cupy()
    except CudaUnavailable as unavailable:
        return skipped(unavailable.cause)
    there = driver.driver_version()
    found = f"CuPy is for CUDA {needed[0]}.{needed[1]}, the driver speaks CUDA {there[0]}.{there[1]}"
    # Within one major version a newer runtime works on an older driver.
    if needed[0] > there[0]:
        return fail(found, f"install a driver for CUDA {needed[0]}, or cupy-cuda{there[0]}x")
    return ok(found)
