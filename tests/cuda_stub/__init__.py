"""A stub of the CUDA driver for tests without a device: built here, and put where the bindings find it.

A process has one driver, and its devices, for life: the first call of the bindings decides. `preload` gives this one
two devices; a test that wants others, or none, starts a process of its own with `environment`. README.md says where
the stub is unfaithful.
"""

import ctypes
import fcntl
import functools
import os
import subprocess
import uuid
from collections.abc import Sequence
from pathlib import Path

_SOURCES = Path(__file__).parent
_LIBRARY = _SOURCES.parents[1] / "build" / "cuda_stub" / "libcuda.so.1"
_BUILD = ["gcc", "-std=c11", "-O1", "-shared", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Werror"]

GRANULARITY_BYTES = 65536
"""What the stub's physical memory comes in, under `preload` and `environment`; 2 MiB on hardware."""
DEVICE_BYTES = 256 * 2**20


def new_uuid() -> str:
    """Returns a UUID for a device. A device's memory is counted by it on the whole machine: share it on purpose."""
    return f"GPU-{uuid.uuid4()}"


@functools.cache
def library() -> Path:
    """Returns the stub, built if the sources are newer."""
    sources = sorted(_SOURCES.glob("*.c"))
    _LIBRARY.parent.mkdir(parents=True, exist_ok=True)
    with (_LIBRARY.parent / "lock").open("w") as lock:  # other test runs build it too
        fcntl.flock(lock, fcntl.LOCK_EX)
        newest = max(source.stat().st_mtime for source in (*sources, *_SOURCES.glob("*.h")))
        if not _LIBRARY.exists() or _LIBRARY.stat().st_mtime < newest:
            made = _LIBRARY.with_suffix(".new")
            subprocess.run([*_BUILD, "-Wl,-soname,libcuda.so.1", "-o", made, *sources], check=True)
            made.rename(_LIBRARY)
    return _LIBRARY


def environment(
    devices: Sequence[str], *, device_bytes: int = DEVICE_BYTES, visible: str | None = None
) -> dict[str, str]:
    """Returns the environment of a process whose driver is the stub; otherwise this process's own.

    `visible` is CUDA_VISIBLE_DEVICES. Faults go beside it: KVSTUB_FAIL, KVSTUB_SLOW, as README.md says.
    """
    folders = [str(library().parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    made = {**os.environ, **_settings(devices, device_bytes), "LD_LIBRARY_PATH": os.pathsep.join(folders)}
    made.pop("CUDA_VISIBLE_DEVICES", None)
    return made if visible is None else {**made, "CUDA_VISIBLE_DEVICES": visible}


@functools.cache
def preload() -> tuple[str, str]:
    """Makes the stub the driver of this process, if none is asked for yet; returns the UUIDs of its two devices."""
    devices = (new_uuid(), new_uuid())
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    os.environ.update(_settings(devices, DEVICE_BYTES))
    _stub()
    return devices


def live_count() -> int:
    """Returns how many handles, ranges, mappings, allocations and streams live in this process."""
    return int(_stub().kvstub_live_count())


@functools.cache
def _stub() -> ctypes.CDLL:
    # The bindings ask for libcuda.so.1, and get what already has that name.
    return ctypes.CDLL(str(library()), ctypes.RTLD_GLOBAL)


def _settings(devices: Sequence[str], device_bytes: int) -> dict[str, str]:
    return {
        "KVSTUB_DEVICES": ",".join(f"{device}:{device_bytes}" for device in devices),
        "KVSTUB_GRANULARITY": str(GRANULARITY_BYTES),
    }
