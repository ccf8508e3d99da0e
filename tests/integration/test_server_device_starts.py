"""Starts of a service on devices, on the stub of the driver: its arena is tried out; one that cannot be says why."""

import contextlib
import os
import signal
from pathlib import Path

import pytest

from integration.services_on_stub import DEVICE_BYTES, on_stub
from process_tree import children_of, open_files
from service_process import ServiceProcess, failed_start
from waiting import until


def maker_pid(service: ServiceProcess, device: str) -> int:
    """Returns the process of a service that has memory of the device; 0 while none has."""
    for pid in children_of(service.process.pid):
        with contextlib.suppress(OSError):
            if any(f"kvstub-{device}" in file for file in open_files(pid).values()):
                return pid
    return 0


def test_a_death_on_the_way_does_not_replace_the_trial_of_the_arena(device: str, tmp_path: Path) -> None:
    """Nobody may rely on memory that was never shared: the process after goes on with the life, and tries it out."""
    slow = tmp_path / "slow"
    slow.touch()
    environment = {**on_stub([device]), "KVSTUB_SLOW": f"cuMemExportToShareableHandle:30:{slow}"}
    with ServiceProcess(tmp_path / "kv.sock", "--arena=cuda_vmm", "--memory=32MiB", environment=environment) as service:
        os.kill(until(lambda: maker_pid(service, device)), signal.SIGKILL)
        slow.unlink()
        assert service.wait_for("ready")["restart_count"] == 1
        assert len(service.entries("arena tried out")) == 1
        assert service.stop() == 0


UNLISTED = ("cuDeviceGetUuid", "cuDeviceGetCount")
"""Where these fail, no device has a name."""


@pytest.mark.parametrize(
    ("faults", "flags", "words"),
    [
        ({"KVSTUB_DEVICES": ""}, [], ["setting arena (cuda_vmm)", "kvharbor doctor"]),
        ({}, ["--devices=GPU-00000000-0000-0000-0000-000000000001"], ["GPU-00000000-0000-0000-0000-000000000001"]),
        ({}, ["--memory=65MiB"], ["setting memory", str(DEVICE_BYTES)]),
        ({"KVSTUB_MPS": "1"}, [], ["setting allow_mps"]),
        ({"KVSTUB_FAIL": "cuMemExportToShareableHandle:1"}, [], ["setting arena", "cuda_vmm"]),
        ({"KVSTUB_FAIL": "cuMemGetInfo:1"}, [], ["setting devices", "cuMemGetInfo"]),
        ({"KVSTUB_FAIL": "cuDeviceGetAttribute:1"}, [], ["setting devices", "cuDeviceGetAttribute"]),
        ({"KVSTUB_FAIL": "cuDeviceGetUuid:1"}, [], ["setting arena", "cuDeviceGetUuid", "kvharbor doctor"]),
        ({"KVSTUB_FAIL": "cuDeviceGetCount:1"}, [], ["setting arena", "cuDeviceGetCount", "kvharbor doctor"]),
        (
            {"KVSTUB_FAIL": "cuIpcGetMemHandle:1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            ["--arena=cuda_ipc", "--cuda-runtime=driver"],
            ["setting arena", "cuIpcGetMemHandle", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"],
        ),
        ({}, ["--arena=cuda_ipc"], ["setting arena", "CuPy"]),
    ],
)
def test_a_start_that_cannot_be_says_why(
    faults: dict[str, str], flags: list[str], words: list[str], device: str, tmp_path: Path
) -> None:
    """In one line, before anything is ready: no device, not that one, too little on it, MPS, no memory to share."""
    environment = {**on_stub([device]), **faults}
    line = failed_start(
        tmp_path / "kv.sock", "--arena=cuda_vmm", *flags, within_s=20.0, environment=environment, most_tries=1
    )
    assert [word for word in words if word not in line] == []
    names_no_device = "KVSTUB_DEVICES" in faults or faults.get("KVSTUB_FAIL", "").startswith(UNLISTED)
    assert device in line or names_no_device
