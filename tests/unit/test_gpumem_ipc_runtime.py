"""Which CUDA runtime is chosen, and what is said where it cannot work. CuPy is the real one, without a driver."""

import os
import subprocess
import sys

import pytest

from kvharbor.gpumem import CudaRuntimeUnknown, CudaUnavailable, runtime_of
from kvharbor.gpumem.cupy_runtime import CupyRuntime

# CuPy keeps what the first call has found for the life of the process, so each test that calls it has one of its own.
# A machine with devices hides them, so that the outcome is the same anywhere.
NO_DEVICES = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}


def printed_by(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], env={**NO_DEVICES, **environment}, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


REFUSED = """
from kvharbor.gpumem import CudaUnavailable, runtime_of
try:
    runtime_of()
except CudaUnavailable as refusal:
    print(refusal)
"""


@pytest.mark.slow
def test_cupy_without_a_device_says_which_call_failed_and_what_to_do() -> None:
    """The default runtime never gives way to the other one: what is wrong with it is shown."""
    text = printed_by(REFUSED, KVHARBOR_CUDA_RUNTIME="")
    assert text.startswith("CUDA is not available: cudaGetDeviceCount failed with cudaError")
    assert "install an NVIDIA driver" in text or "let the process see a device" in text


@pytest.mark.slow
def test_cupy_takes_handles_of_64_bytes_only() -> None:
    """Why a mapping counts them first: a bare IndexError says nothing of CUDA to whoever sees it."""
    text = printed_by("""
import cupy
for length in (0, 63, 65, 64):
    try:
        cupy.cuda.runtime.ipcOpenMemHandle(bytes(length))
    except Exception as refusal:
        print(length, type(refusal).__name__)
""")
    assert text.splitlines() == ["0 IndexError", "63 IndexError", "65 IndexError", "64 CUDARuntimeError"]


@pytest.mark.slow
def test_gpumem_imports_no_cuda_and_no_torch() -> None:
    """A worker with host memory needs neither the packages nor the second that importing them takes."""
    text = printed_by("""
import sys
import kvharbor.gpumem
print([name for name in ("cupy", "cuda", "torch") if name in sys.modules])
""")
    assert text.strip() == "[]"


def test_without_cupy_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is optional; who asks for device memory is told how to get it."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(CudaUnavailable, match=r"CuPy cannot be imported.*pip install 'kvharbor\[cuda\]'"):
        CupyRuntime()


@pytest.mark.parametrize(("argument", "variable"), [("cuda", ""), (None, "CuPy"), ("cuda", "driver")])
def test_an_unknown_runtime_is_refused(monkeypatch: pytest.MonkeyPatch, argument: str | None, variable: str) -> None:
    """A misspelt setting must not mean the default; an argument comes before the environment."""
    monkeypatch.setenv("KVHARBOR_CUDA_RUNTIME", variable)
    with pytest.raises(CudaRuntimeUnknown, match=f"no CUDA runtime '{argument or variable}': set one of cupy, driver"):
        runtime_of(argument)
