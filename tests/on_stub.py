"""Fixtures of tests whose devices are those of the stub of CUDA's driver. See tests/cuda_stub/README.md."""

from collections.abc import Iterator

import pytest

import cuda_stub
from ipc_owner import IpcOwner
from kvharbor.gpumem.ipc_runtime import RUNTIME_VARIABLE


@pytest.fixture
def nothing_here(stub_devices: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """What the driver has of this process outside a test, which closes what it opens and so leaves as much."""
    monkeypatch.setenv(RUNTIME_VARIABLE, "driver")
    before = cuda_stub.live_count()
    yield before
    assert cuda_stub.live_count() == before


def owner_environment(devices: tuple[str, str]) -> dict[str, str]:
    """The environment of a process that calls these devices by the stub."""
    return {**cuda_stub.environment(devices), RUNTIME_VARIABLE: "driver"}


@pytest.fixture(scope="module")
def ipc_owner(stub_devices: tuple[str, str]) -> Iterator[IpcOwner]:
    """A process that owns cuda_ipc arenas: one for all tests, since it takes longer to start than any of them."""
    with IpcOwner(owner_environment(stub_devices)) as started:
        yield started
