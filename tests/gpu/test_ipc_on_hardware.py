"""CUDA IPC through CuPy on a real device: views in torch and CuPy of what another process owns, and CuPy's errors.

None of this has a form on the stub: CuPy's runtime does not run there.
"""

from collections.abc import Iterator

import pytest
import torch

from cuda_here import CudaHere
from ipc_owner import IpcOwner
from kvharbor.gpumem import (
    BlockOrder,
    BlockViews,
    DataType,
    DeviceFailed,
    Export,
    InsufficientMemory,
    IpcArena,
    IpcMapping,
    Layout,
    MappingInUse,
    ViewUnavailable,
    device_of,
    runtime_of,
)
from kvharbor.gpumem.devices import memory_of

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

BLOCK_COUNT = 6
TORCH_TYPES = {
    DataType.FLOAT32: torch.float32,
    DataType.FLOAT16: torch.float16,
    DataType.BFLOAT16: torch.bfloat16,
    DataType.FLOAT8_E4M3: torch.float8_e4m3fn,
    DataType.FLOAT8_E5M2: torch.float8_e5m2,
}


@pytest.fixture(scope="module")
def cuda() -> CudaHere:
    return CudaHere.on_hardware("cupy")


@pytest.fixture(scope="module")
def owner(cuda: CudaHere) -> Iterator[IpcOwner]:
    with IpcOwner(cuda.environment) as started:
        yield started


@pytest.mark.parametrize("order", list(BlockOrder), ids=lambda order: order.value)
@pytest.mark.parametrize("data_type", list(TORCH_TYPES), ids=lambda kind: kind.value)
def test_every_data_type_is_viewed_where_it_lies(
    cuda: CudaHere, owner: IpcOwner, data_type: DataType, order: BlockOrder
) -> None:
    """A store through torch is in the owner's memory and in CuPy's view of it; nothing is copied on the way."""
    descriptor = Layout.attention("m", 3, 2, 8, data_type, 16, order=order).descriptor(BLOCK_COUNT)
    export = owner.create(descriptor.size_bytes, cuda.devices[0])
    content = torch.arange(16, dtype=torch.float32).reshape(2, 8).to(TORCH_TYPES[data_type])
    expected = content.view(torch.uint8).numpy().tobytes()
    with IpcMapping.attach(export, runtime=runtime_of("cupy")) as mapping:
        views = BlockViews(mapping, descriptor)
        tensor, run = views.torch("v", 2), views.torch_run("v", 2, 4, 1)
        assert (tensor.dtype, tuple(tensor.shape)) == (TORCH_TYPES[data_type], (BLOCK_COUNT, 16, 2, 8))
        assert tensor.data_ptr() == mapping.address + descriptor.page_offset_bytes("v", 2, 0)
        assert run.data_ptr() == tensor[4].data_ptr()
        tensor[4, 7] = content.to(tensor.device)
        torch.cuda.synchronize(tensor.device)
        first = descriptor.page_offset_bytes("v", 2, 4) + 7 * len(expected)
        assert owner.read(export, first, len(expected)) == expected
        assert views.cupy("v", 2)[4, 7].tobytes() == expected
        assert bytes(run[7].view(torch.uint8).cpu().numpy()) == expected
        with pytest.raises(ViewUnavailable, match="use cupy or torch"):
            views.numpy("v", 2)
        views.close()
        del tensor, run
    owner.free(export)


def test_a_tensor_keeps_the_mapping_open(cuda: CudaHere, owner: IpcOwner) -> None:
    """M8: torch holds CuPy's array, and that the mapping."""
    descriptor = Layout.attention("m", 1, 1, 8, DataType.FLOAT16, 16).descriptor(BLOCK_COUNT)
    export = owner.create(descriptor.size_bytes, cuda.devices[0])
    mapping = IpcMapping.attach(export)
    views = BlockViews(mapping, descriptor)
    part = views.torch("k", 0)[2, 3:5]
    views.close()
    with pytest.raises(MappingInUse):
        mapping.close()
    del part
    mapping.close()
    owner.free(export)


def test_a_refused_export_leaves_no_error_behind(cuda: CudaHere) -> None:
    """CUDA keeps the last error until somebody asks: the next call must not find it."""
    import cupy

    device, runtime = device_of(cuda.devices[0]), runtime_of("cupy")
    with cupy.cuda.Device(device.ordinal):
        from_pool = cupy.cuda.MemoryAsyncPool().malloc(1 << 20)
        with pytest.raises(DeviceFailed, match="cudaIpcGetMemHandle failed with cudaErrorInvalidValue"):
            runtime.handle_of(device, from_pool.ptr)
        assert int(cupy.arange(4).sum()) == 6
        del from_pool
    IpcArena.create(1, device, runtime).close()


@pytest.mark.parametrize("name", ["cupy", "driver"])
def test_a_full_device_refuses_and_goes_on(cuda: CudaHere, name: str) -> None:
    """The error is that of a full device in both runtimes, with what is left."""
    device, runtime = device_of(cuda.devices[0]), runtime_of(name)
    with pytest.raises(InsufficientMemory, match=device.uuid):
        IpcArena.create(memory_of(device).total_bytes * 2, device, runtime)
    IpcArena.create(1, device, runtime).close()


def test_both_runtimes_open_what_either_has_made(cuda: CudaHere, owner: IpcOwner) -> None:
    """They share the primary context, so an address from one is good for the other."""
    export: Export = owner.create(1 << 20, cuda.devices[0])
    owner.write(export, 0, b"either")
    for name in ("driver", "cupy"):
        with IpcMapping.attach(export, runtime=runtime_of(name)) as mapping:
            views = BlockViews(mapping, Layout.attention("m", 1, 1, 8, DataType.UINT8, 16).descriptor(2))
            assert views.page("k", 0, 0)[:6].tobytes() == b"either"
            views.close()
    owner.free(export)
