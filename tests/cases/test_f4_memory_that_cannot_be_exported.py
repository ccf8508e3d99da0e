"""F4: memory that cannot be exported is found out before the first worker comes, with a message that helps.

On the stub of the driver: that arenas are allocated apart from such settings was not seen on hardware.
"""

import subprocess
import sys

import pytest

import cuda_stub

pytestmark = pytest.mark.slow

SELF_TEST = """
import sys
from kvharbor.gpumem import ArenaUnproven, visible_devices
from kvharbor.gpumem.arena import ArenaKind
from kvharbor.gpumem.two_process import require_arena
try:
    require_arena(ArenaKind(sys.argv[1]), visible_devices()[0].uuid, runtime="driver")
except ArenaUnproven as unproven:
    print(unproven)
"""
ASYNC_POOL = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
SEGMENTS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
EXPORTS = {"cuda_ipc": "cuIpcGetMemHandle", "cuda_vmm": "cuMemExportToShareableHandle"}


def complaint(kind: str, **environment: str) -> str:
    """What the start-up self-test of a service with such memory says; nothing if it passes."""
    on_stub = cuda_stub.environment([cuda_stub.new_uuid()])
    variables = {name: value for name, value in on_stub.items() if name not in ASYNC_POOL} | environment
    command = [sys.executable, "-c", SELF_TEST, kind]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.parametrize("kind", EXPORTS)
@pytest.mark.parametrize("setting", [ASYNC_POOL, SEGMENTS, {}], ids=["async pool", "segments", "none"])
def test_memory_is_allocated_plainly_whatever_the_environment_says(kind: str, setting: dict[str, str]) -> None:
    """Inputs (a), (b) and (c): the self-test passes, as arenas come from no library's allocator."""
    assert complaint(kind, **setting) == ""


@pytest.mark.parametrize("kind", EXPORTS)
@pytest.mark.parametrize("setting", [ASYNC_POOL, SEGMENTS], ids=["async pool", "segments"])
def test_where_the_export_fails_all_the_same_the_message_names_the_setting(kind: str, setting: dict[str, str]) -> None:
    """Something else in the process may have taken the allocator over: an operator is told where to look."""
    said = complaint(kind, KVSTUB_FAIL=f"{EXPORTS[kind]}:1:1", **setting)
    assert said.startswith(f"the arena {kind} on device GPU-")
    assert f"{EXPORTS[kind]} failed with CUDA_ERROR_INVALID_VALUE (invalid argument)" in said
    assert f"run without PYTORCH_CUDA_ALLOC_CONF={setting['PYTORCH_CUDA_ALLOC_CONF']}" in said
