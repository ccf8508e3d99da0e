"""Packages, environment and the service's socket."""

import os
import socket as sockets
from importlib import metadata
from pathlib import Path

import pytest

from kvharbor.gpumem import CudaUnavailable
from kvharbor.gpumem.arena import ArenaKind
from kvharbor.server.configuration.settings import Settings
from kvharbor.server.doctor import environment, packages, transport
from kvharbor.server.doctor.check import ANY_ARENA, State, obstacles
from made_up_machine import MadeUpMachine, found_by


@pytest.fixture
def machine(tmp_path: Path) -> MadeUpMachine:
    return MadeUpMachine.plain_host(tmp_path)


def test_versions_of_what_is_installed_are_told(machine: MadeUpMachine) -> None:
    """For a report of a fault."""
    finding = found_by(packages.checks(machine.surroundings()), "packages.kvharbor")
    for name in ("kvharbor", "grpcio", "protobuf", "numpy"):
        assert f"{name} {metadata.version(name)}" in finding.found


def without(*missing: str) -> object:
    """Stands for `metadata.version` where some distributions are not installed."""
    real = metadata.version

    def version(name: str) -> str:
        if name in missing:
            raise metadata.PackageNotFoundError(name)
        return real(name)

    return version


def test_a_package_for_devices_that_is_missing_is_in_their_way_only(
    machine: MadeUpMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's arena does without."""
    machine.write("proc/driver/nvidia/version", "NVRM version: 580.65\n")
    monkeypatch.setattr(metadata, "version", without("cuda-bindings", "torch"))
    finding = found_by(packages.checks(machine.surroundings()), "packages.cuda_bindings")
    assert (finding.state, set(finding.needed_by)) == (State.FAIL, {ArenaKind.CUDA_IPC, ArenaKind.CUDA_VMM})
    assert "kvharbor[cuda]" in finding.remedy
    assert found_by(packages.checks(machine.surroundings()), "packages.torch").state is State.SKIPPED


@pytest.mark.parametrize(
    ("file", "arena", "state"),
    [
        ("", ArenaKind.HOST, State.SKIPPED),
        ("proc/driver/nvidia/version", ArenaKind.HOST, State.FAIL),
        ("dev/dxg", ArenaKind.HOST, State.FAIL),
        ("", ArenaKind.CUDA_IPC, State.FAIL),
    ],
)
def test_where_nobody_wants_devices_their_packages_are_no_failure(
    machine: MadeUpMachine, monkeypatch: pytest.MonkeyPatch, file: str, arena: ArenaKind, state: State
) -> None:
    """Without a driver, of whatever kind, on the host's arena. The other arenas do not work there all the same."""
    if file:
        machine.write(file, "")
    monkeypatch.setattr(metadata, "version", without("cuda-bindings"))
    monkeypatch.setattr(metadata, "distributions", list)
    checks = list(packages.checks(machine.surroundings(arena=arena)))
    findings = [found_by(checks, f"packages.{name}") for name in ("cuda_bindings", "cupy")]
    assert [(finding.state, "kvharbor[cuda]" in finding.remedy) for finding in findings] == [(state, True)] * 2
    assert (obstacles(findings, ArenaKind.HOST), obstacles(findings, ArenaKind.CUDA_IPC)) == ([], findings)


class Distribution:
    """An installed build of CuPy, by name."""

    def __init__(self, name: str) -> None:
        self.name = name


@pytest.mark.parametrize(
    ("installed", "state", "told"),
    [
        ((), State.FAIL, "CuPy is not installed"),
        (("cupy-cuda12x", "cupy-cuda13x"), State.WARN, "pip uninstall cupy-cuda12x cupy-cuda13x"),
    ],
)
def test_cupy_is_one_build_of_several(
    machine: MadeUpMachine, monkeypatch: pytest.MonkeyPatch, installed: tuple[str, ...], state: State, told: str
) -> None:
    """Two write over each other's files."""
    machine.write("proc/driver/nvidia/version", "NVRM version: 580.65\n")
    monkeypatch.setattr(metadata, "distributions", lambda: [Distribution(name) for name in installed])
    monkeypatch.setattr(metadata, "version", lambda _: "14.2.0")
    finding = found_by(packages.checks(machine.surroundings()), "packages.cupy")
    assert finding.state is state
    assert told in finding.found + finding.remedy


def test_cupy_is_needed_where_the_settings_have_it_make_the_calls(machine: MadeUpMachine) -> None:
    """The driver's own calls do without."""
    by_driver = Settings(cuda_runtime="driver")
    needed = [
        found_by(packages.checks(machine.surroundings(settings=settings)), "packages.cupy").needed_by
        for settings in (Settings(), by_driver)
    ]
    assert needed == [{ArenaKind.CUDA_IPC}, frozenset()]


def test_a_cupy_that_cannot_be_imported_is_a_failure_with_its_words(
    machine: MadeUpMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that it lacks, for example."""

    def missing() -> tuple[int, int]:
        raise CudaUnavailable("CuPy cannot be imported: libnvrtc.so.13", "pip install it")

    monkeypatch.setattr(packages, "cuda_version_of_cupy", missing)
    finding = found_by(packages.checks(machine.surroundings()), "packages.cupy")
    assert (finding.state, finding.remedy) == (State.FAIL, "pip install it")
    assert "libnvrtc.so.13" in finding.found


def test_an_environment_without_settings_is_fine(machine: MadeUpMachine) -> None:
    """All three of its checks."""
    assert {check.finding().state for check in environment.checks(machine.surroundings())} == {State.OK}


@pytest.mark.parametrize(
    ("variable", "value", "state"),
    [("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", State.OK), ("LD_PRELOAD", "/lib/x.so", State.WARN)],
)
def test_an_allocator_setting_is_named(machine: MadeUpMachine, variable: str, value: str, state: State) -> None:
    """Those of libraries do not matter to arenas; a preloaded library may."""
    around = machine.surroundings(environment={variable: value})
    finding = found_by(environment.checks(around), "environment.allocators")
    assert finding.state is state
    assert f"{variable}={value}" in finding.found


@pytest.mark.parametrize("value", ["", "-1", "NoDevFiles, void"])
def test_variables_that_show_no_device_are_warned_of(machine: MadeUpMachine, value: str) -> None:
    """Else the driver works and counts none."""
    finding = found_by(
        environment.checks(machine.surroundings(environment={"CUDA_VISIBLE_DEVICES": value})), "environment.devices"
    )
    assert finding.state is (State.OK if "," in value else State.WARN)


def test_an_mps_daemon_is_found_where_the_environment_says(machine: MadeUpMachine) -> None:
    """Or at its usual place."""
    machine.write("run/mps/control", "")
    for variables, state in (({}, State.OK), ({"CUDA_MPS_PIPE_DIRECTORY": "/run/mps"}, State.WARN)):
        assert (
            found_by(environment.checks(machine.surroundings(environment=variables)), "environment.mps").state is state
        )
    machine.write("tmp/nvidia-mps/control", "")
    assert found_by(environment.checks(machine.surroundings()), "environment.mps").state is State.WARN


def test_settings_that_cannot_be_used_are_in_every_arenas_way(machine: MadeUpMachine) -> None:
    """With the words of `kvharbor serve`."""
    around = machine.surroundings(settings_failure="unknown setting 'memroy'")
    finding = found_by(transport.checks(around), "service.settings")
    assert (finding.state, finding.found, finding.needed_by) == (State.FAIL, "unknown setting 'memroy'", ANY_ARENA)


def test_the_folder_of_the_socket_is_looked_at(machine: MadeUpMachine, tmp_path: Path) -> None:
    """There, not there, and where the name alone is too long."""

    def found(folder: Path) -> State:
        around = machine.surroundings(settings=Settings(socket=str(folder / "kv.sock")))
        return found_by(transport.checks(around), "service.folder").state

    assert found(tmp_path) is State.OK
    assert found(tmp_path / "missing") is State.WARN
    assert found(tmp_path / ("x" * 120)) is State.WARN


def test_a_folder_of_somebody_else_is_warned_of(
    machine: MadeUpMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write everywhere, so that the answer is made up."""
    monkeypatch.setattr(os, "access", lambda *_: False)
    around = machine.surroundings(settings=Settings(socket=str(tmp_path / "kv.sock")))
    finding = found_by(transport.checks(around), "service.folder")
    assert finding.state is State.WARN
    assert f"user {os.geteuid()} may not write to the folder {tmp_path}" in finding.found


def test_a_service_that_is_not_there_is_missed_only_where_it_was_named(machine: MadeUpMachine, tmp_path: Path) -> None:
    """Before the first start there is none."""
    path = str(tmp_path / "kv.sock")
    unnamed = machine.surroundings(settings=Settings(socket=path))
    assert found_by(transport.checks(unnamed), "service.answer").state is State.SKIPPED
    finding = found_by(transport.checks(machine.surroundings(socket=path)), "service.answer")
    assert finding.state is State.WARN
    assert "there is no such socket" in finding.found


def test_a_socket_without_a_listener_is_told_apart(machine: MadeUpMachine, tmp_path: Path) -> None:
    """It is what a killed service leaves."""
    path = tmp_path / "kv.sock"
    with sockets.socket(sockets.AF_UNIX) as listener:
        listener.bind(str(path))
    finding = found_by(transport.checks(machine.surroundings(socket=str(path))), "service.answer")
    assert "nobody listens there" in finding.found
