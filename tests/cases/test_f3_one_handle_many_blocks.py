"""Case F3: one IPC handle, many blocks. Two users of a process have one opening, and each finds its own block."""

from collections.abc import Iterator

import pytest

from cuda_here import CUDAS, CudaHere, cuda_here
from ipc_owner import IpcOwner
from kvharbor.gpumem import (
    BlockOrder,
    BlockViews,
    DataType,
    Device,
    Export,
    IpcMapping,
    Layout,
    Plane,
    driver,
    runtime_of,
)
from kvharbor.gpumem.devices import current
from kvharbor.gpumem.ipc_runtime import IpcRuntime

MIB = 2**20
BLOCK_BYTES = 2 * MIB
POOL_BYTES = 64 * MIB
LAYOUT = Layout(
    "f3",
    16,
    (Plane("whole", 1, DataType.UINT8, BLOCK_BYTES, interior="opaque"),),
    order=BlockOrder.BLOCK_MAJOR,
    scratch_blocks=0,
)
DESCRIPTOR = LAYOUT.descriptor(POOL_BYTES // BLOCK_BYTES)
PATTERN = bytes(range(1, 256)) * 8


@pytest.fixture(params=CUDAS)
def cuda(request: pytest.FixtureRequest) -> CudaHere:
    return cuda_here(request)


@pytest.fixture
def owner(cuda: CudaHere) -> Iterator[IpcOwner]:
    with IpcOwner(cuda.environment) as started:
        yield started


class Counted:
    """A runtime that counts what goes through it."""

    def __init__(self, runtime: IpcRuntime) -> None:
        self._runtime = runtime
        self.open_count = 0
        self.close_count = 0

    def open(self, device: Device, handle: bytes) -> int:
        self.open_count += 1
        return self._runtime.open(device, handle)

    def close(self, device: Device, address: int) -> None:
        self.close_count += 1
        self._runtime.close(device, address)

    def synchronise(self, device: Device) -> None:
        self._runtime.synchronise(device)


class Client:
    """One of several users in a process: a mapping and views of its own, as a client object has them."""

    def __init__(self, export: Export, runtime: Counted) -> None:
        self.mapping = IpcMapping.attach(export, runtime=runtime)  # type: ignore[arg-type]
        self.views = BlockViews(self.mapping, DESCRIPTOR)

    def address(self, block: int) -> int:
        return int(self.views.page("whole", 0, block).data.ptr)

    def write(self, block: int, content: bytes) -> None:
        with current(self.mapping.device):
            driver.write_bytes(self.address(block), content)
            driver.context_synchronize()

    def read(self, block: int) -> bytes:
        with current(self.mapping.device):
            return driver.read_bytes(self.address(block), BLOCK_BYTES)

    def close(self) -> None:
        self.views.close()
        self.mapping.close()


@pytest.mark.slow
def test_f3_blocks_of_one_handle_are_told_apart_and_it_is_closed_as_often_as_opened(
    cuda: CudaHere, owner: IpcOwner
) -> None:
    """F3: base plus offset; the first to close takes nothing from the second; one opening at a time."""
    export = owner.create(DESCRIPTOR.size_bytes, cuda.devices[0])
    assert (len(export.ipc_handle), export.offset_bytes, export.size_bytes) == (64, 0, POOL_BYTES)
    runtime = Counted(runtime_of(cuda.runtime))
    first, second = Client(export, runtime), Client(export, runtime)
    assert first.address(0) == second.mapping.address
    assert second.address(5) - second.address(0) == 10 * MIB == 10_485_760

    second.write(5, PATTERN)
    assert [block for block in range(DESCRIPTOR.block_count) if any(first.read(block))] == [5]
    assert owner.read(export, 10 * MIB, len(PATTERN)) == PATTERN
    first.close()
    assert second.read(5) == PATTERN + bytes(BLOCK_BYTES - len(PATTERN))
    assert (runtime.open_count, runtime.close_count) == (1, 0)
    second.close()
    assert (runtime.open_count, runtime.close_count) == (1, 1)

    third = Client(export, runtime)
    assert third.read(5).startswith(PATTERN)
    third.close()
    assert (runtime.open_count, runtime.close_count) == (2, 2)
    owner.free(export)
