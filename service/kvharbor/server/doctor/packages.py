"""Python and the packages: which are there, in which versions, and whether they can be imported at all."""

import platform
import sys
from collections.abc import Callable, Iterator
from importlib import import_module, metadata

from kvharbor.gpumem.arena import ArenaKind
from kvharbor.gpumem.cupy_runtime import cuda_version_of_cupy
from kvharbor.server.doctor.check import NO_ARENA, ON_DEVICES, Check, Outcome, fail, lacking, ok, skipped, warn
from kvharbor.server.doctor.surroundings import Surroundings

INSTALL_CUDA = "pip install 'kvharbor[cuda]' (CUDA 13; for CUDA 12: cupy-cuda12x and cuda-bindings 12)"


def checks(around: Surroundings) -> Iterator[Check]:
    """Yields the checks of this topic."""
    yield Check("packages.python", lambda: ok(f"{platform.python_version()}, {sys.executable}"))
    yield Check("packages.kvharbor", _kvharbor)
    yield Check("packages.torch", _torch)
    absent = lacking if around.does_without_devices else fail
    yield Check("packages.cuda_bindings", lambda: _cuda_bindings(absent), ON_DEVICES)
    by_cupy = around.settings.cuda_runtime == "cupy"
    yield Check("packages.cupy", lambda: _cupy(absent), frozenset({ArenaKind.CUDA_IPC}) if by_cupy else NO_ARENA)


def versions(*distributions: str) -> dict[str, str]:
    """Returns the versions of those distributions that are installed."""
    found = {}
    for distribution in distributions:
        try:
            found[distribution] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return found


def _listed(found: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in found.items())


def _kvharbor() -> Outcome:
    return ok(_listed(versions("kvharbor", "grpcio", "protobuf", "numpy")))


def _torch() -> Outcome:
    found = versions("torch")
    return ok(_listed(found)) if found else skipped("not installed: only engines need it")


def _cuda_bindings(absent: Callable[[str, str], Outcome]) -> Outcome:
    found = versions("cuda-bindings")
    if not found:
        return absent("cuda-bindings is not installed", INSTALL_CUDA)
    # Not in vain: it is compiled code, and may not fit this Python.
    import_module("cuda.bindings.driver")
    return ok(_listed(found))


def _cupy(absent: Callable[[str, str], Outcome]) -> Outcome:
    names = sorted({name for each in metadata.distributions() if (name := each.name or "").startswith("cupy")})
    if not names:
        return absent("CuPy is not installed", f"{INSTALL_CUDA}; or use --arena cuda_vmm, which does without")
    found = _listed(versions(*names))
    if len(names) > 1:
        return warn(f"several builds of CuPy: {found}", f"pip uninstall {' '.join(names)}, then install one of them")
    major, minor = cuda_version_of_cupy()
    return ok(f"{found}, for CUDA {major}.{minor}")
