"""What the driver says of a device, good and bad. Real calls are in tests/integration/test_doctor.py, on the stub."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvharbor.gpumem import CudaUnavailable, Device, DeviceNotVisible
from kvharbor.gpumem import driver as calls
from kvharbor.gpumem.arena import ArenaKind
from kvharbor.gpumem.devices import DeviceMemory
from kvharbor.server.configuration.settings import Settings
from kvharbor.server.doctor import arenas, devices, driver
from kvharbor.server.doctor.check import State, obstacles
from made_up_machine import GIB, MadeUpMachine, found_by

GPU = Device("GPU-7f3c0000-0000-0000-0000-000000000001", 0, "NVIDIA H200")
MIG = Device("MIG-7f3c0000-0000-0000-0000-000000000002", 1, "NVIDIA H200 MIG 1g.18gb")
ABLE = {
    "COMPUTE_MODE": 0,
    "UNIFIED_ADDRESSING": 1,
    "IPC_EVENT_SUPPORTED": 1,
    "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 1,
    "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": 1,
}
Say = Callable[..., None]


@pytest.fixture
def machine(tmp_path: Path) -> MadeUpMachine:
    return MadeUpMachine.plain_host(tmp_path)


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Say:
    """Has the driver show two devices, and say of each what it can, with these changes."""

    def set_attributes(**changed: int) -> None:
        monkeypatch.setattr(calls, "device_attribute", lambda name, _ordinal: {**ABLE, **changed}[name])

    monkeypatch.setattr(devices, "visible_devices", lambda: (GPU, MIG))
    set_attributes()
    return set_attributes


def test_a_device_that_can_do_all_is_fine(machine: MadeUpMachine, say: Say) -> None:
    """By the driver's word; whether it is true the two-process test shows."""
    checks = list(devices.checks(machine.surroundings()))
    assert found_by(checks, "devices.visible").found == f"0: {GPU.uuid}; 1: {MIG.uuid}"
    for name in ("compute_mode", "cuda_ipc", "cuda_vmm"):
        assert found_by(checks, f"devices.0.{name}").state is State.OK


@pytest.mark.parametrize(
    ("changed", "check", "state", "needed_by"),
    [
        ({"COMPUTE_MODE": 3}, "compute_mode", State.FAIL, {ArenaKind.CUDA_IPC, ArenaKind.CUDA_VMM}),
        ({"UNIFIED_ADDRESSING": 0}, "cuda_ipc", State.FAIL, {ArenaKind.CUDA_IPC}),
        ({"IPC_EVENT_SUPPORTED": 0}, "cuda_ipc", State.WARN, {ArenaKind.CUDA_IPC}),
        ({"HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": 0}, "cuda_vmm", State.FAIL, {ArenaKind.CUDA_VMM}),
        ({"VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 0}, "cuda_vmm", State.FAIL, {ArenaKind.CUDA_VMM}),
    ],
)
def test_what_a_device_cannot_do_is_in_the_way_of_those_that_need_it(
    machine: MadeUpMachine, say: Say, changed: dict[str, int], check: str, state: State, needed_by: set[ArenaKind]
) -> None:
    """With what to do."""
    say(**changed)
    finding = found_by(devices.checks(machine.surroundings()), f"devices.0.{check}")
    assert (finding.state, set(finding.needed_by)) == (state, needed_by)
    assert finding.remedy


@pytest.mark.parametrize(
    ("arena", "memory", "state"),
    [
        (ArenaKind.CUDA_VMM, "2GiB", State.FAIL),
        (ArenaKind.CUDA_VMM, "1GiB", State.OK),
        (ArenaKind.CUDA_VMM, "80%", State.OK),
        (ArenaKind.HOST, "2GiB", State.OK),
    ],
)
def test_less_free_memory_than_the_settings_ask_for_is_a_failure(
    machine: MadeUpMachine, say: Say, monkeypatch: pytest.MonkeyPatch, arena: ArenaKind, memory: str, state: State
) -> None:
    """Of an arena on devices: for the host's, the setting is about the host."""
    monkeypatch.setattr(devices, "memory_of", lambda _: DeviceMemory(GIB, 4 * GIB))
    around = machine.surroundings(settings=Settings.model_validate({"memory": memory}), arena=arena)
    finding = found_by(devices.checks(around), "devices.0.memory")
    assert finding.state is state
    assert finding.found.startswith("1.0 GiB of 4.0 GiB free")


@pytest.mark.parametrize(
    ("is_client", "allowed", "state"),
    [(False, False, State.OK), (True, False, State.FAIL), (True, True, State.WARN), (False, True, State.OK)],
)
def test_clients_of_mps_are_refused_unless_allowed(
    machine: MadeUpMachine, say: Say, monkeypatch: pytest.MonkeyPatch, is_client: bool, allowed: bool, state: State
) -> None:
    """As the service itself does."""
    monkeypatch.setattr(devices, "mps_client", lambda _: is_client)
    around = machine.surroundings(settings=Settings(allow_mps=allowed))
    assert found_by(devices.checks(around), "devices.0.mps").state is state


class NotSupported(Exception):
    """Stands for NVML's."""


class LibraryNotFound(Exception):
    """Stands for NVML's."""


@pytest.mark.parametrize(
    ("answer", "state", "found"),
    [
        ((1, 1), State.OK, "MIG mode is on"),
        ((0, 1), State.WARN, "MIG mode is off and will be on"),
        (NotSupported(), State.OK, "the device has no MIG mode"),
        (RuntimeError("odd"), State.FAIL, "RuntimeError: odd"),
    ],
)
def test_the_mig_mode_is_what_nvml_says(
    machine: MadeUpMachine,
    say: Say,
    monkeypatch: pytest.MonkeyPatch,
    answer: tuple[int, int] | Exception,
    state: State,
    found: str,
) -> None:
    """NVML is let go of in each case."""
    ends: list[str] = []

    def mode(handle: str) -> tuple[int, int]:
        assert handle == f"handle of {GPU.uuid}"
        if isinstance(answer, Exception):
            raise answer
        return answer

    nvml = SimpleNamespace(
        NVMLError_NotSupported=NotSupported,
        NVMLError_LibraryNotFound=LibraryNotFound,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: ends.append("shutdown"),
        nvmlDeviceGetHandleByUUID=lambda uuid: f"handle of {uuid}",
        nvmlDeviceGetMigMode=mode,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    finding = found_by(devices.checks(machine.surroundings()), "devices.0.mig")
    assert (finding.state, finding.found, ends) == (state, found, ["shutdown"])


def test_nvml_may_be_missing(machine: MadeUpMachine, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for one thing that the driver does not tell."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert found_by(devices.checks(machine.surroundings()), "devices.0.mig").state is State.SKIPPED


def test_a_mig_instance_is_told_to_be_one(machine: MadeUpMachine, say: Say) -> None:
    """Its memory is shared within it only."""
    finding = found_by(devices.checks(machine.surroundings()), "devices.1.mig")
    assert finding.state is State.WARN
    assert f"CUDA_VISIBLE_DEVICES={MIG.uuid}" in finding.remedy


def test_a_driver_without_devices_is_a_failure(machine: MadeUpMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to try an arena on, and that is said at one place."""
    for topic in (devices, arenas):
        monkeypatch.setattr(topic, "chosen_devices", lambda _: ())
    monkeypatch.setattr(devices, "visible_devices", lambda: ())
    around = machine.surroundings()
    assert [check.name for check in devices.checks(around)] == ["devices.visible"]
    assert found_by(devices.checks(around), "devices.visible").state is State.FAIL
    assert found_by(arenas.checks(around), "arena.cuda_vmm").state is State.SKIPPED


def test_a_configured_device_that_is_not_visible_is_named_with_those_that_are(
    machine: MadeUpMachine, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides, by UUID."""
    other = "GPU-7f3c0000-0000-0000-0000-00000000000f"

    def not_there(uuid: str) -> Device:
        raise DeviceNotVisible(uuid, [GPU.uuid])

    monkeypatch.setattr(devices, "device_of", not_there)
    finding = found_by(devices.checks(machine.surroundings(settings=Settings(devices=(other,)))), "devices.visible")
    assert finding.state is State.FAIL
    assert other in finding.found
    assert GPU.uuid in finding.found


@pytest.mark.parametrize(
    ("cupy", "there", "state"),
    [((13, 2), (13, 0), State.OK), ((13, 0), (12, 8), State.FAIL), ((12, 9), (13, 0), State.OK)],
)
def test_cupy_runs_on_a_driver_of_its_own_major_version_or_a_later_one(
    machine: MadeUpMachine,
    monkeypatch: pytest.MonkeyPatch,
    cupy: tuple[int, int],
    there: tuple[int, int],
    state: State,
) -> None:
    """NVIDIA's rule of minor version compatibility."""
    monkeypatch.setattr(calls, "init", lambda: None)
    monkeypatch.setattr(calls, "driver_version", lambda: there)
    monkeypatch.setattr(driver, "cuda_version_of_cupy", lambda: cupy)
    finding = found_by(driver.checks(machine.surroundings()), "driver.for_cupy")
    assert (finding.state, bool(finding.remedy)) == (state, state is State.FAIL)


@pytest.mark.parametrize(
    ("environment", "remedy"),
    [
        ({}, "install the driver"),
        ({"container": "x"}, "--gpus all"),
        ({"KUBERNETES_SERVICE_HOST": "x"}, "nvidia.com/gpu"),
    ],
)
def test_without_a_driver_the_remedy_is_that_of_the_place(
    machine: MadeUpMachine, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], remedy: str
) -> None:
    """A container is not where to install one."""

    def missing() -> None:
        raise CudaUnavailable("no library", "see elsewhere")

    monkeypatch.setattr(calls, "init", missing)
    for arena, state in ((ArenaKind.CUDA_VMM, State.FAIL), (ArenaKind.HOST, State.SKIPPED)):
        checks = list(driver.checks(machine.surroundings(environment=environment, arena=arena)))
        finding = found_by(checks, "driver.api")
        assert (finding.state, finding.found) == (state, "no library")
        assert remedy in finding.remedy
        assert obstacles([finding], ArenaKind.CUDA_VMM) == [finding]
        assert found_by(checks, "driver.for_cupy").state is State.SKIPPED


def test_without_the_package_nothing_is_said_of_the_driver(
    machine: MadeUpMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More devices for a container would not mend that; packages.cuda_bindings says what would."""

    def missing() -> None:
        raise CudaUnavailable("no package", "see elsewhere")

    monkeypatch.setattr(calls, "bindings", missing)
    finding = found_by(driver.checks(machine.surroundings()), "driver.api")
    assert (finding.state, finding.found) == (State.SKIPPED, "no package, see packages.cuda_bindings")


def test_the_kernel_module_is_told_where_it_is(machine: MadeUpMachine) -> None:
    """Its first line has the version."""
    assert found_by(driver.checks(machine.surroundings()), "driver.module").state is State.SKIPPED
    machine.write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX  Kernel Module  580.65\nGCC version: 14\n")
    finding = found_by(driver.checks(machine.surroundings()), "driver.module")
    assert (finding.state, finding.found) == (State.OK, "NVRM version: NVIDIA UNIX Kernel Module 580.65")
