"""The tree of errors: distinct reasons, and every value of a message as metadata."""

import re

import pytest

import kvharbor.gpumem as gpumem
from kvharbor.gpumem import GpumemError

ERRORS = [
    gpumem.LayoutInvalid("tp_size", 0, "an int from 1 to 1024", "correct it"),
    gpumem.ArenaTooSmall(10, needed_bytes=96, scratch_blocks=1),
    gpumem.PlaneUnknown("key", known_planes="k, v"),
    gpumem.OutOfBounds("block", 9, limit=4, remedy="take another"),
    gpumem.CopyConflict(3),
    gpumem.ViewUnavailable("run", "k", "its blocks do not touch"),
    gpumem.CudaRuntimeUnknown("cuda", known_runtimes="cupy, driver", variable="KVHARBOR_CUDA_RUNTIME"),
    gpumem.LayoutMismatch({"tp_size": ("1", "2"), "planes.k.page_bytes": ("32", "64")}),
    gpumem.ArenaUnfit("it is not a memfd", size_bytes=4096),
    gpumem.MappingInUse(4096),
    gpumem.ArenaUnproven("cuda_ipc", device="GPU-1", cause="it reads something else", remedy="report it"),
    gpumem.DeviceNotVisible("GPU-1", ["GPU-2", "GPU-3"]),
    gpumem.IpcRefused("equal pids", device="GPU-1", exporter_pid=7, own_pid=8, remedy="share a PID namespace"),
    gpumem.CudaUnavailable("cuInit failed", "install a driver"),
    gpumem.DeviceFailed("cuMemAlloc", "CUDA_ERROR_UNKNOWN", "unknown error"),
    gpumem.InsufficientMemory(10, available_bytes=7, limited_by="MemAvailable"),
    gpumem.ArenaClosed("mapping"),
    gpumem.ReservationCancelled(5, size_bytes=10),
]


def test_every_class_has_an_example_here_and_a_reason_of_its_own() -> None:
    """A server maps reasons, so two classes must not share one."""
    classes: list[type[GpumemError]] = GpumemError.__subclasses__()
    assert {type(error) for error in ERRORS} == set(classes)
    reasons = [GpumemError.reason, *(cls.reason for cls in classes)]
    assert len(set(reasons)) == len(reasons)
    assert [reason for reason in reasons if not re.fullmatch(r"[A-Z][A-Z_]{1,61}[A-Z]", reason)] == []


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_every_value_of_the_metadata_stands_in_the_message(error: GpumemError) -> None:
    """The message is built from the attributes, and a program gets each of them without parsing it."""
    metadata = error.metadata()
    assert metadata != {}
    for key, value in metadata.items():
        assert re.fullmatch(r"[a-z][a-zA-Z0-9]*", key)
        assert value in str(error)
