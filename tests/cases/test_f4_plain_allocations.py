"""Case F4, on the stub and on hardware: arenas are plain allocations, whatever allocators the process has been given,
and a client in the owner's own process is told that it has the memory already."""

import os
from collections.abc import Iterator

import pytest

from cuda_here import CUDAS, CudaHere, cuda_here
from ipc_owner import IpcOwner, OwnerRefused
from kvharbor.gpumem import ArenaKind, IpcMapping, driver, runtime_of
from kvharbor.gpumem.devices import current
from kvharbor.gpumem.two_process import check_arena

pytestmark = pytest.mark.slow

MIB = 2**20
ASYNC_POOL = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
LIMITED = {"CUPY_GPU_MEMORY_LIMIT": "1024"}


@pytest.fixture(params=CUDAS)
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaHere]:
    """CUDA for this process and for those that it starts by itself."""
    here = cuda_here(request)
    with monkeypatch.context() as changed:
        for name in ("LD_LIBRARY_PATH", "KVHARBOR_CUDA_RUNTIME"):
            if name in here.environment:
                changed.setenv(name, here.environment[name])
        yield here


def require_exported(cuda: CudaHere, owner: IpcOwner) -> None:
    """Writes a stamp in the owner's memory and reads it here."""
    export = owner.create(4 * MIB, cuda.devices[0])
    owner.write(export, 4 * MIB - 5, b"stamp")
    with IpcMapping.attach(export, runtime=runtime_of(cuda.runtime)) as mapping, current(mapping.device):
        assert driver.read_bytes(mapping.address + 4 * MIB - 5, 5) == b"stamp"
    owner.free(export)


@pytest.mark.parametrize("settings", [ASYNC_POOL, EXPANDABLE, LIMITED], ids=["async pool", "segments", "limit"])
def test_f4_arenas_are_plain_whatever_allocator_the_environment_asks_for(
    cuda: CudaHere, settings: dict[str, str]
) -> None:
    """F4 (a), (b): torch's settings and CuPy's limit are about their own pools, and arenas come from none of them."""
    with IpcOwner({**cuda.environment, **settings}) as owner:
        require_exported(cuda, owner)


@pytest.mark.gpu
def test_f4_arenas_are_plain_beside_an_async_pool_of_cupys() -> None:
    """F4 (a): also when code in the same process has given CuPy a stream-ordered pool."""
    cuda = CudaHere.on_hardware("cupy")
    with IpcOwner(cuda.environment) as owner:
        owner.use_async_pool()
        require_exported(cuda, owner)


def test_f4_the_self_test_passes(cuda: CudaHere) -> None:
    """F4 (c): exported here, opened in a child, and the stamp read there."""
    verdict = check_arena(ArenaKind.CUDA_IPC, cuda.devices[0], runtime=cuda.runtime)
    assert (verdict.works, verdict.cause) == (True, "")


def test_f4_a_client_in_the_owners_own_process_is_told_so(cuda: CudaHere) -> None:
    """F4 (d): a message in place of the driver's bare code, and the owner goes on."""
    with IpcOwner(cuda.environment) as owner:
        export = owner.create(2 * MIB, cuda.devices[0])
        assert export.exporter_pid == owner.process.pid != os.getpid()
        with pytest.raises(OwnerRefused, match=r"it is its own: use the memory at IpcArena.address") as refused:
            owner.map_own(export)
        assert refused.value.reason == "IPC_REFUSED"
        require_exported(cuda, owner)
