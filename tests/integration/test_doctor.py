"""`kvharbor doctor` as an operator runs it: without a device, on the stub of the driver, and beside a service."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

import cuda_stub
from conftest import StartService
from kvharbor.client import connect

pytestmark = pytest.mark.slow

CUDA_KINDS = ("cuda_ipc", "cuda_vmm")


@dataclass(frozen=True, slots=True)
class Report:
    """What one run has found, by check, and its exit status."""

    status: int
    findings: Mapping[str, Mapping[str, str]]

    def state(self, check: str) -> str:
        return self.findings[check]["state"]

    def failed(self) -> set[str]:
        return {check for check, finding in self.findings.items() if finding["state"] == "FAIL"}


def run(*arguments: str, environment: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
    """Runs the command; settings of whoever runs the tests do not count."""
    command = [sys.executable, "-m", "kvharbor.server.cli", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)


def examined(*arguments: str, environment: Mapping[str, str]) -> Report:
    """Runs it for programs."""
    done = run("--json", *arguments, environment=environment)
    assert done.stderr == ""
    findings = json.loads(done.stdout)
    assert all(set(finding) == {"check", "state", "found", "remedy"} for finding in findings)
    return Report(done.returncode, {finding["check"]: finding for finding in findings})


def plain(**more: str) -> dict[str, str]:
    """An environment without settings, and with no device on any machine."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVHARBOR_")}
    return {**kept, "CUDA_VISIBLE_DEVICES": "", **more}


def on_stub(device: str | None = None, **more: str) -> dict[str, str]:
    """An environment whose driver is the stub, with one device."""
    stub = cuda_stub.environment([device or cuda_stub.new_uuid()])
    kept = {name: value for name, value in stub.items() if not name.startswith("KVHARBOR_")}
    return {**kept, "KVHARBOR_CUDA_RUNTIME": "driver", **more}


def test_without_a_device_the_host_arena_works() -> None:
    """The default: what is missing for devices is told with its remedy, and is no error."""
    report = examined(environment=plain())
    assert (report.status, report.state("arena.host")) == (0, "OK")
    has_driver = Path("/proc/driver/nvidia/version").exists() or Path("/dev/dxg").exists()
    assert report.failed() == ({"driver.api"} if has_driver else set())
    assert report.findings["driver.api"]["remedy"]
    assert {report.state(f"arena.{kind}") for kind in CUDA_KINDS} == {"skipped"}


@pytest.mark.parametrize("kind", CUDA_KINDS)
def test_without_a_device_an_arena_that_needs_one_is_an_error(kind: str) -> None:
    """Asked for by flag, or by the settings."""
    assert examined("--arena", kind, environment=plain()).status == 1
    assert examined(environment=plain(KVHARBOR_ARENA=kind)).status == 1


def test_people_get_a_table_and_what_works() -> None:
    """Nothing is cut short in it, and the last lines say it all."""
    shown = run(environment=plain(COLUMNS="100"))
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "…" not in shown.stdout
    assert shown.stdout.splitlines()[-3:] == [
        "the chosen arena host: works here",
        "arena cuda_ipc: does not work here, see driver.api",
        "arena cuda_vmm: does not work here, see driver.api",
    ]


def test_an_arena_that_does_not_exist_is_refused() -> None:
    """In one line, with those that do."""
    refused = run("--arena", "gpu", environment=plain())
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "kvharbor: there is no arena 'gpu': name one of host, cuda_ipc, cuda_vmm\n"


def test_settings_that_cannot_be_used_do_not_stop_the_rest() -> None:
    """`kvharbor serve` would refuse them, so the status is an error."""
    report = examined(environment=plain(KVHARBOR_MEMROY="2GiB"))
    assert (report.status, report.state("service.settings"), report.state("arena.host")) == (1, "FAIL", "OK")
    assert "KVHARBOR_MEMORY" in report.findings["service.settings"]["found"]


def test_a_service_is_found_at_its_socket(harbor: str) -> None:
    """It need not be there, but is told when it is."""
    report = examined("--socket", harbor, environment=plain())
    assert report.findings["service.answer"]["found"] == f"a service answers at {harbor}"


def test_it_can_be_a_worker_of_a_service_for_a_moment(harbor: str) -> None:
    """Which no other check shows: that memory crosses into this container. Nothing of it stays."""
    report = examined("--socket", harbor, "--attach", environment=plain())
    found = report.findings["worker.attach"]["found"]
    assert (report.status, found) == (0, "host memory of the service is mapped, written and read here")
    with connect(harbor) as session:
        assert [pool.name for pool in session.list_pools() if "doctor" in pool.name] == []


@pytest.mark.parametrize("kind", CUDA_KINDS)
def test_it_can_be_a_worker_on_a_device(start_fresh: StartService, kind: str) -> None:
    """Over the stub, with the service's memory and not with its own."""
    environment = on_stub()
    service = start_fresh(environment=environment, arena=kind)
    report = examined("--arena", kind, "--socket", str(service.socket), "--attach", environment=environment)
    found = report.findings["worker.attach"]["found"]
    assert (report.status, found) == (0, f"{kind} memory of the service is mapped, written and read here")


def test_a_worker_that_does_not_see_the_device_is_told_both_sides(start_fresh: StartService) -> None:
    """F5, in a container that was given another device."""
    device, other = cuda_stub.new_uuid(), cuda_stub.new_uuid()
    service = start_fresh(environment=on_stub(device), arena="cuda_vmm")
    report = examined("--socket", str(service.socket), "--attach", environment=on_stub(other))
    finding = report.findings["worker.attach"]
    assert (report.status, finding["state"]) == (1, "FAIL")
    assert device in finding["found"]
    assert other in finding["found"]


def test_a_service_that_is_not_there_cannot_be_worked_for(tmp_path: Path) -> None:
    """Who asks for it means it: the status is an error, but of the arena nothing is said."""
    path = tmp_path / "kv.sock"
    report = examined("--socket", str(path), "--attach", environment=plain())
    assert (report.status, report.state("worker.attach"), report.state("service.answer")) == (1, "FAIL", "WARN")
    told = report.findings["worker.attach"]["found"]
    assert told == f"cannot be told: no kvharbor service answers at {path} (No such file or directory)"
    shown = run("--socket", str(path), "--attach", environment=plain(COLUMNS="80"))
    assert "the chosen arena host: cannot be told, see worker.attach" in shown.stdout
    assert "│worker.attach " in shown.stdout  # a name is searched for: it is not folded


def test_a_service_without_memory_left_is_not_blamed(start_fresh: StartService) -> None:
    """There is nothing to try with, which is no fault of this place."""
    service = start_fresh(memory="2MiB")
    report = examined("--socket", str(service.socket), "--attach", environment=plain())
    assert (report.status, report.state("worker.attach")) == (0, "skipped")


def test_with_a_driver_both_arenas_on_devices_work() -> None:
    """All the way to another process, over the stub."""
    report = examined("--arena", "cuda_vmm", environment=on_stub())
    assert (report.status, report.failed()) == (0, set())
    assert {report.state(f"arena.{kind}.0") for kind in CUDA_KINDS} == {"OK"}
    assert "256.0 MiB of 256.0 MiB free" in report.findings["devices.0.memory"]["found"]


@pytest.mark.parametrize(
    ("kind", "call"),
    [("cuda_ipc", "cuIpcGetMemHandle"), ("cuda_vmm", "cuMemExportToShareableHandle")],
)
def test_memory_that_cannot_be_exported_is_told_with_the_allocator_setting(kind: str, call: str) -> None:
    """F4: the operator reads what to change; the other kind of arena is tried all the same."""
    setting = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    environment = on_stub(KVSTUB_FAIL=f"{call}:1:1", **dict([setting.split("=", 1)]))
    report = examined("--arena", kind, environment=environment)
    assert (report.status, report.failed()) == (1, {f"arena.{kind}.0"})
    finding = report.findings[f"arena.{kind}.0"]
    assert call in finding["found"]
    assert f"run without {setting}" in finding["remedy"]


def test_memory_that_another_process_cannot_open_is_told_with_its_words() -> None:
    """The call that fails is made there, and only there."""
    report = examined("--arena", "cuda_ipc", environment=on_stub(KVSTUB_FAIL="cuIpcOpenMemHandle:1:201"))
    finding = report.findings["arena.cuda_ipc.0"]
    assert (report.status, finding["state"]) == (1, "FAIL")
    assert (
        "another process cannot use the memory: cuIpcOpenMemHandle failed with CUDA_ERROR_INVALID_CONTEXT"
        in (finding["found"])
    )
    assert "PID namespace" in finding["remedy"]


@pytest.mark.parametrize(
    ("settings", "status", "state"), [({}, 1, "FAIL"), ({"KVHARBOR_ALLOW_MPS": "true"}, 0, "WARN")]
)
def test_clients_of_mps_are_an_error_unless_allowed(settings: dict[str, str], status: int, state: str) -> None:
    """As the service refuses them."""
    report = examined("--arena", "cuda_vmm", environment=on_stub(KVSTUB_MPS="1", **settings))
    assert (report.status, report.state("devices.0.mps")) == (status, state)


def test_a_configured_device_that_is_not_visible_is_told_by_uuid() -> None:
    """F5: of both sides."""
    visible, configured = cuda_stub.new_uuid(), cuda_stub.new_uuid()
    report = examined("--arena", "cuda_ipc", environment=on_stub(visible, KVHARBOR_DEVICES=configured))
    found = report.findings["devices.visible"]["found"]
    assert (report.status, visible in found, configured in found) == (1, True, True)


def test_a_driver_that_fails_in_a_way_nobody_has_foreseen_is_told_as_it_says() -> None:
    """And stops no other check."""
    report = examined("--arena", "cuda_vmm", environment=on_stub(KVSTUB_FAIL="cuMemSetAccess:1"))
    assert (report.status, report.state("arena.cuda_ipc.0")) == (1, "OK")
    found = report.findings["arena.cuda_vmm.0"]["found"]
    assert "cuMemSetAccess failed with CUDA_ERROR_UNKNOWN (unknown error)" in found
