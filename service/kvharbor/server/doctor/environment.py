"""Variables that change what CUDA does, or how memory is allocated."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from kvharbor.gpumem.allocator_settings import allocator_settings
from kvharbor.server.doctor.check import Check, Outcome, ok, warn
from kvharbor.server.doctor.surroundings import Surroundings

_DEFAULT_PIPE = "/tmp/nvidia-mps"
_NOBODY = ("", "-1", "none", "void")


def checks(around: Surroundings) -> Iterator[Check]:
    """Yields the checks of this topic."""
    yield Check("environment.allocators", lambda: _allocators(around.environment))
    yield Check("environment.devices", lambda: _devices(around.environment))
    yield Check("environment.mps", lambda: _mps(around))


def _allocators(environment: Mapping[str, str]) -> Outcome:
    settings = allocator_settings(environment)
    if not settings:
        return ok("nothing that changes how device memory is allocated")
    found = f"{', '.join(settings)}: arenas are allocated apart from it"
    if any(setting.startswith("LD_PRELOAD=") for setting in settings):
        return warn(found, "a preloaded library may replace the calls of CUDA: if a test of arenas fails, go without")
    return ok(found)


def _devices(environment: Mapping[str, str]) -> Outcome:
    shown = []
    for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
        value = environment.get(name)
        if value is None:
            continue
        shown.append(f"{name}={value}")
        if value.strip().lower() in _NOBODY:
            return warn(f"{name}={value!r} shows no device", f"unset {name} or name devices by UUID, for a GPU arena")
    return ok(", ".join(shown) or "every device of this machine or container is visible")


def _mps(around: Surroundings) -> Outcome:
    folder = around.environment.get("CUDA_MPS_PIPE_DIRECTORY", _DEFAULT_PIPE)
    if not (around.root / Path(folder).relative_to("/") / "control").exists():
        return ok(f"no MPS daemon at {folder}")
    return warn(
        f"an MPS daemon's pipe is at {folder}: processes that find it become its clients",
        "see devices.N.mps; set CUDA_MPS_PIPE_DIRECTORY to an empty folder for service and workers",
    )
