"""Where the tests of this folder run: on hardware, and on the stub of the driver when GPU_TESTS_ON_STUB is set.

The dry run shows that the tests themselves work; what they are for only a device can show.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from conftest import StartService
from cuda_here import CudaHere
from gpu.device_worker import DeviceWorker, DriverWorker, TorchWorker
from integration.client_worker import WorkerProcess
from kvharbor.gpumem.ipc_runtime import RUNTIME_VARIABLE
from service_process import ServiceProcess

DRY_RUN = bool(os.environ.get("GPU_TESTS_ON_STUB"))
_ON_STUB = [("cuda_ipc", "stub"), ("cuda_vmm", "stub")] if DRY_RUN else []
_ON_HARDWARE = [("cuda_ipc", "cupy"), ("cuda_ipc", "driver"), ("cuda_vmm", "driver")]
PLACES = [pytest.param(place, id="-".join(place)) for place in _ON_STUB] + [
    pytest.param(place, id="-".join(place), marks=pytest.mark.gpu) for place in _ON_HARDWARE
]
"""(arena, by what CUDA is called)."""

StartWorker = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Place:
    """A kind of arena, the devices for it, and workers that can touch it."""

    arena: str
    cuda: CudaHere
    worker_type: type[DeviceWorker]

    @property
    def on_hardware(self) -> bool:
        """Whether there is more than the stub."""
        return self.worker_type is TorchWorker

    def flags(self, **flags: str) -> dict[str, str]:
        """Returns the flags of a service whose pools lie here."""
        return {"arena": self.arena, "cuda_runtime": self.cuda.runtime, "memory": "64MiB", **flags}


@pytest.fixture(scope="module", params=PLACES)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """Where pools lie; other processes that this one starts find the same devices."""
    arena, by = request.param
    if by == "stub":
        made = Place(arena, CudaHere.stubbed(request.getfixturevalue("stub_devices")), DriverWorker)
    else:
        made = Place(arena, CudaHere.on_hardware(by), TorchWorker)
    with pytest.MonkeyPatch.context() as changed:
        for name in ("LD_LIBRARY_PATH", RUNTIME_VARIABLE):
            if name in made.cuda.environment:
                changed.setenv(name, made.cuda.environment[name])
        yield made


@pytest.fixture(scope="module")
def start_here(place: Place, start_service: StartService) -> StartService:
    """Starts services with pools here, which live until the end of the module."""
    return lambda **flags: start_service(environment=place.cuda.environment, **place.flags(**flags))


@pytest.fixture
def start_worker(place: Place) -> Iterator[StartWorker]:
    """Starts workers; ends those that the test has not killed."""
    started: list[WorkerProcess] = []

    def start(service: ServiceProcess, pool_name: str, block_count: int = 8) -> WorkerProcess:
        started.append(WorkerProcess(service.target, pool_name, block_count, place.worker_type))
        return started[-1]

    yield start
    for worker in started:
        worker.end()
