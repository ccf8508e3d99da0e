"""Which settings put memory beyond export."""

import pytest

from kvharbor.gpumem import DeviceFailed, IpcRefused
from kvharbor.gpumem.allocator_settings import allocator_settings
from kvharbor.gpumem.remedies import cause_and_remedy


@pytest.mark.parametrize(
    "setting",
    [
        "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64,expandable_segments:True",
        "PYTORCH_ALLOC_CONF=backend:cudaMallocAsync",
        "TF_GPU_ALLOCATOR=cuda_malloc_async",
        "LD_PRELOAD=/usr/lib/libvgpu.so",
    ],
)
def test_a_setting_that_matters_is_told_as_it_stands(setting: str) -> None:
    """An operator finds it by its own text."""
    name, _, value = setting.partition("=")
    assert allocator_settings({name: value, "PATH": "/bin"}) == (setting,)


@pytest.mark.parametrize("value", ["", "expandable_segments:False", "backend:native,max_split_size_mb:64"])
def test_a_harmless_value_is_not_told(value: str) -> None:
    """The variable alone is no fault."""
    assert allocator_settings({"PYTORCH_CUDA_ALLOC_CONF": value}) == ()


@pytest.mark.parametrize("call", ["cuIpcGetMemHandle", "cudaIpcGetMemHandle", "cuMemExportToShareableHandle"])
def test_a_refused_export_names_the_allocator_setting(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """F4: the setting, not the bare code, is what an operator can change."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    cause, remedy = cause_and_remedy(DeviceFailed(call, "CUDA_ERROR_INVALID_VALUE", "invalid argument"))
    assert cause == f"{call} failed with CUDA_ERROR_INVALID_VALUE (invalid argument)"
    assert "run without PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in remedy


@pytest.mark.parametrize(
    ("call", "code", "remedy"),
    [
        ("cuIpcOpenMemHandle", "CUDA_ERROR_INVALID_CONTEXT", "PID namespace"),
        ("cudaIpcGetMemHandle", "cudaErrorInvalidValue", "--arena cuda_vmm"),
        ("cuMemImportFromShareableHandle", "CUDA_ERROR_INVALID_DEVICE", "see the same device"),
        ("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY", "free some memory"),
        ("cudaGetDeviceCount", "cudaErrorCallRequiresNewerDriver", "update the driver"),
        ("cuCtxSynchronize", "CUDA_ERROR_ECC_UNCORRECTABLE", "nvidia-smi"),
    ],
)
def test_every_failed_call_has_a_remedy(call: str, code: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what it was at."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    assert remedy in cause_and_remedy(DeviceFailed(call, code, ""))[1]


def test_an_error_that_has_a_remedy_is_split_into_both() -> None:
    """The remedy stands in one of them only."""
    refusal = IpcRefused("it is its own", device="GPU-1", exporter_pid=7, own_pid=7, remedy="use the address")
    cause, remedy = cause_and_remedy(refusal)
    assert (cause.endswith("it is its own"), remedy) == (True, "use the address")
