"""Where CUDA comes from in a test that runs on the stub of the driver and, marked `gpu`, on hardware."""

import os
from dataclasses import dataclass

import pytest

import cuda_stub
from kvharbor.gpumem import visible_devices
from kvharbor.gpumem.ipc_runtime import RUNTIME_VARIABLE

CUDAS = ["stub", pytest.param("driver", marks=pytest.mark.gpu), pytest.param("cupy", marks=pytest.mark.gpu)]
"""For `pytest.fixture(params=...)`: the stub, and a real device through each of the runtimes."""


@dataclass(frozen=True, slots=True)
class CudaHere:
    """Devices that this process sees, and the environment in which another one sees the same."""

    devices: tuple[str, ...]
    runtime: str
    environment: dict[str, str]

    @classmethod
    def stubbed(cls, devices: tuple[str, ...]) -> "CudaHere":
        """The stub, which is this process's driver and has these devices."""
        return cls(devices, "driver", {**cuda_stub.environment(devices), RUNTIME_VARIABLE: "driver"})

    @classmethod
    def on_hardware(cls, runtime: str) -> "CudaHere":
        """The real driver, by CuPy or by the driver's own calls."""
        devices = tuple(device.uuid for device in visible_devices())
        return cls(devices, runtime, {**os.environ, RUNTIME_VARIABLE: runtime})


def cuda_here(request: pytest.FixtureRequest) -> CudaHere:
    """Returns what a fixture with CUDAS as its parameters has to offer."""
    if request.param == "stub":
        return CudaHere.stubbed(request.getfixturevalue("stub_devices"))
    return CudaHere.on_hardware(request.param)
