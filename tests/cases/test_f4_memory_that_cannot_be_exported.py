"""F4: memory that cannot be exported is found out before the first worker comes, with a message that helps.

Arenas are plain allocations, whatever allocators the environment asks for or the process has been given, and a client
in the owner's own process is told that it has the memory already. What is not marked `gpu` has run on the stub only.
"""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

import cuda_stub
from cuda_here import CUDAS, CudaHere, cuda_here
from ipc_owner import IpcOwner, OwnerRefused
from kvharbor.gpumem import IpcMapping, driver, runtime_of
from kvharbor.gpumem.devices import current

pytestmark = pytest.mark.slow

MIB = 2**20
ASYNC_POOL = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
SEGMENTS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
LIMITED = {"CUPY_GPU_MEMORY_LIMIT": "1024"}
EXPORTS = {"cuda_ipc": "cuIpcGetMemHandle", "cuda_vmm": "cuMemExportToShareableHandle"}

SELF_TEST = """
import sys
from kvharbor.gpumem import ArenaUnproven
from kvharbor.gpumem.arena import ArenaKind
from kvharbor.gpumem.two_process import require_arena
try:
    require_arena(ArenaKind(sys.argv[1]), sys.argv[2])
except ArenaUnproven as unproven:
    print(unproven)
"""


@pytest.fixture(params=CUDAS)
def cuda(request: pytest.FixtureRequest) -> CudaHere:
    """CUDA for this process and for those that are started with its environment."""
    return cuda_here(request)


@pytest.fixture
def owner(cuda: CudaHere) -> Iterator[IpcOwner]:
    """A process that owns arenas."""
    with IpcOwner(cuda.environment) as started:
        yield started


def complaint(cuda: CudaHere, kind: str, **variables: str) -> str:
    """What the start-up self-test of a service with such memory says; nothing if it passes."""
    plain = {name: value for name, value in cuda.environment.items() if name not in ASYNC_POOL | LIMITED}
    command = [sys.executable, "-c", SELF_TEST, kind, cuda.devices[0]]
    return subprocess.run(command, env=plain | variables, capture_output=True, text=True, timeout=60, check=True).stdout


def require_exported(cuda: CudaHere, owner: IpcOwner) -> None:
    """Writes a stamp in the owner's memory and reads it here."""
    export = owner.create(4 * MIB, cuda.devices[0])
    owner.write(export, 4 * MIB - 5, b"stamp")
    with IpcMapping.attach(export, runtime=runtime_of(cuda.runtime)) as mapping, current(mapping.device):
        assert driver.read_bytes(mapping.address + 4 * MIB - 5, 5) == b"stamp"
    owner.free(export)


@pytest.mark.parametrize("kind", EXPORTS)
@pytest.mark.parametrize(
    "settings", [ASYNC_POOL, SEGMENTS, LIMITED, {}], ids=["async pool", "segments", "limit", "none"]
)
def test_the_self_test_passes_whatever_allocator_the_environment_asks_for(
    cuda: CudaHere, kind: str, settings: dict[str, str]
) -> None:
    """Inputs (a), (b), (c): torch's settings and CuPy's limit are about their own pools, of which no arena comes."""
    assert complaint(cuda, kind, **settings) == ""


@pytest.mark.gpu
def test_arenas_are_plain_beside_an_async_pool_of_cupys() -> None:
    """Input (a): also when code in the same process has given CuPy a stream-ordered pool."""
    cuda = CudaHere.on_hardware("cupy")
    with IpcOwner(cuda.environment) as owner:
        owner.use_async_pool()
        require_exported(cuda, owner)


@pytest.mark.parametrize("kind", EXPORTS)
@pytest.mark.parametrize("settings", [ASYNC_POOL, SEGMENTS], ids=["async pool", "segments"])
def test_where_the_export_fails_all_the_same_the_message_names_the_setting(kind: str, settings: dict[str, str]) -> None:
    """Something else in the process may have taken the allocator over: an operator is told where to look."""
    cuda = CudaHere.stubbed((cuda_stub.new_uuid(),))
    said = complaint(cuda, kind, KVSTUB_FAIL=f"{EXPORTS[kind]}:1:1", **settings)
    assert said.startswith(f"the arena {kind} on device GPU-")
    assert f"{EXPORTS[kind]} failed with CUDA_ERROR_INVALID_VALUE (invalid argument)" in said
    assert f"run without PYTORCH_CUDA_ALLOC_CONF={settings['PYTORCH_CUDA_ALLOC_CONF']}" in said


def test_a_client_in_the_owners_own_process_is_told_so(cuda: CudaHere, owner: IpcOwner) -> None:
    """Input (d): a message in place of the driver's bare code, and the owner goes on."""
    export = owner.create(2 * MIB, cuda.devices[0])
    assert export.exporter_pid == owner.process.pid != os.getpid()
    with pytest.raises(OwnerRefused, match=r"it is its own: use the memory at IpcArena.address") as refused:
        owner.map_own(export)
    assert refused.value.reason == "IPC_REFUSED"
    require_exported(cuda, owner)
