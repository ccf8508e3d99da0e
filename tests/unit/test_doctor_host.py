"""Place, kernel, limits and memory, on made-up machines and on this one."""

import errno
import os
from pathlib import Path

import pytest

from kvharbor.gpumem.arena import ArenaKind
from kvharbor.server.configuration.settings import Settings
from kvharbor.server.doctor import kernel, limits, memory, place
from kvharbor.server.doctor.check import ANY_ARENA, State
from kvharbor.server.doctor.place import Place, place_of
from kvharbor.server.sessions import peer
from made_up_machine import GIB, MadeUpMachine, found_by

OWN_NAMESPACE = 4026532999
UNKNOWN_OPTION = 9999


@pytest.fixture
def machine(tmp_path: Path) -> MadeUpMachine:
    return MadeUpMachine.plain_host(tmp_path)


def test_a_plain_host_is_one(machine: MadeUpMachine) -> None:
    """All its namespaces are the kernel's first."""
    around = machine.surroundings()
    assert around.place is Place.HOST
    findings = [check.finding() for check in place.checks(around)]
    assert [(finding.state, finding.found) for finding in findings] == [
        (State.OK, "a plain host"),
        (State.OK, "the host's"),
        (State.OK, "the host's: does not matter, nothing here uses System V memory or CUDA's IPC events"),
    ]


@pytest.mark.parametrize("mark", [".dockerenv", "run/.containerenv"])
def test_a_container_is_known_by_the_mark_of_its_runtime(machine: MadeUpMachine, mark: str) -> None:
    """Docker and podman each leave one."""
    machine.write(mark, "")
    assert place_of(machine.root, {}) is Place.CONTAINER


def test_a_container_without_a_mark_is_known_by_its_namespaces_or_groups(machine: MadeUpMachine) -> None:
    """containerd and CRI-O leave none."""
    machine.write("proc/1/cgroup", "12:memory:/kubepods/burstable/pod1/0abc\n")
    assert place_of(machine.root, {}) is Place.CONTAINER
    machine.write("proc/1/cgroup", "0::/\n")
    assert place_of(machine.root, {}) is Place.HOST
    machine.set_namespace("cgroup", OWN_NAMESPACE)
    assert place_of(machine.root, {}) is Place.CONTAINER


def test_a_pod_is_known_by_what_kubernetes_puts_into_it(machine: MadeUpMachine) -> None:
    """The environment, or the account that is mounted where the environment is emptied."""
    assert place_of(machine.root, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) is Place.POD
    machine.write("var/run/secrets/kubernetes.io/serviceaccount/token", "")
    assert place_of(machine.root, {}) is Place.POD


def test_a_machine_that_hides_process_1_is_a_host(machine: MadeUpMachine) -> None:
    """As with hidepid."""
    (machine.root / "proc/1/cgroup").unlink()
    assert place_of(machine.root, {}) is Place.HOST


@pytest.mark.parametrize(
    ("environment", "remedy"),
    [({"container": "podman"}, "--pid=container:NAME"), ({"KUBERNETES_SERVICE_HOST": "x"}, "shareProcessNamespace")],
)
def test_an_own_pid_namespace_is_warned_of_with_what_fits_the_place(
    machine: MadeUpMachine, environment: dict[str, str], remedy: str
) -> None:
    """Equal pids in two containers are one process to CUDA IPC."""
    machine.set_namespace("pid", OWN_NAMESPACE)
    machine.write("proc/1/comm", "kvharbor\n")
    finding = found_by(place.checks(machine.surroundings(environment=environment)), "place.pid_namespace")
    assert finding.state is State.WARN
    assert remedy in finding.remedy
    assert "--arena cuda_vmm" in finding.remedy


def test_a_pid_namespace_that_the_pod_shares_is_fine(machine: MadeUpMachine) -> None:
    """Its process 1 is the pod's pause."""
    machine.set_namespace("pid", OWN_NAMESPACE)
    machine.write("proc/1/comm", "pause\n")
    finding = found_by(place.checks(machine.surroundings()), "place.pid_namespace")
    assert (finding.state, finding.found) == (State.OK, "shared by the pod's containers")


def test_wsl_is_told_to_have_no_shared_device_memory(machine: MadeUpMachine) -> None:
    """The two-process test would say so in CUDA's words."""
    machine.write("proc/version", "Linux version 5.15.90.1-microsoft-standard-WSL2\n")
    finding = found_by(place.checks(machine.surroundings()), "place.kind")
    assert (finding.state, finding.found) == (State.WARN, "Windows Subsystem for Linux")


def test_this_kernel_can_do_what_the_service_needs(machine: MadeUpMachine) -> None:
    """Tried out, not read from a version: the tests themselves need it."""
    findings = {check.name: check.finding() for check in kernel.checks(machine.surroundings())}
    assert {name for name, finding in findings.items() if finding.state is not State.OK} <= {"kernel.peer_pidfd"}
    assert findings["kernel.release"].found == os.uname().release


def test_a_kernel_without_peer_pidfds_is_warned_of(machine: MadeUpMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a kernel refuses the option as this one does an unknown one."""
    monkeypatch.setattr(peer, "SO_PEERPIDFD", UNKNOWN_OPTION)
    finding = found_by(kernel.checks(machine.surroundings()), "kernel.peer_pidfd")
    assert finding.state is State.WARN
    assert "Linux 6.5" in finding.remedy


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM])
def test_a_kernel_or_a_filter_without_pidfds_is_a_failure_for_every_arena(
    machine: MadeUpMachine, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """The service would refuse its first worker."""

    def refuse(_pid: int) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    finding = found_by(kernel.checks(machine.surroundings()), "kernel.pidfd")
    assert (finding.state, finding.needed_by) == (State.FAIL, ANY_ARENA)
    assert os.strerror(code) in finding.found
    assert "seccomp" in finding.remedy


@pytest.mark.parametrize(
    ("setting", "found", "has_remedy"),
    [
        ("always within_size [advise] never deny force", "shared memory: advise", False),
        ("always within_size advise [never] deny force", "shared memory: never: host arenas", True),
        (None, "this kernel has none for shared memory", False),
    ],
)
def test_huge_pages_are_a_hint_at_most(
    machine: MadeUpMachine, setting: str | None, found: str, has_remedy: bool
) -> None:
    """Nothing fails without them."""
    path = machine.root / "sys/kernel/mm/transparent_hugepage/shmem_enabled"
    path.unlink() if setting is None else path.write_text(setting)
    finding = found_by(kernel.checks(machine.surroundings()), "kernel.huge_pages")
    assert (finding.state, bool(finding.remedy)) == (State.OK, has_remedy)
    assert finding.found.startswith(found)


def test_limits_that_are_enough_are_told(machine: MadeUpMachine) -> None:
    """With what they have to be enough for."""
    machine.write("dev/shm/.keep", "")
    findings = [check.finding() for check in limits.checks(machine.surroundings())]
    assert [finding.state for finding in findings] == [State.OK] * 3
    assert findings[0].found == "524288, 4160 are needed for max_sessions"
    assert "does not matter" in findings[2].found


def test_too_few_descriptors_are_told_as_sessions(machine: MadeUpMachine) -> None:
    """With the number that would do."""
    machine.write("proc/self/limits", "Max open files   256   1088   files\nMax locked memory  65536  65536  bytes\n")
    finding = found_by(limits.checks(machine.surroundings()), "limits.open_files")
    assert (finding.state, finding.found) == (State.WARN, "1088: enough for 256 sessions, max_sessions is 1024")
    assert "raise the hard limit to 4160" in finding.remedy
    assert "64.0 KiB" in found_by(limits.checks(machine.surroundings()), "limits.locked_memory").found


def test_a_proc_without_the_limit_is_a_failure_that_says_so(machine: MadeUpMachine) -> None:
    """Not an empty answer."""
    machine.write("proc/self/limits", "")
    finding = found_by(limits.checks(machine.surroundings()), "limits.open_files")
    assert (finding.state, finding.found) == (State.FAIL, "OSError: /proc/self/limits has no line 'Max open files'")


def with_limit(machine: MadeUpMachine, limit_bytes: int) -> None:
    machine.write("proc/self/mountinfo", "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    machine.write("sys/fs/cgroup/memory.max", f"{limit_bytes}\n")
    machine.write("sys/fs/cgroup/memory.current", "0\n")


def test_the_room_is_told_with_what_limits_it(machine: MadeUpMachine) -> None:
    """A container's limit, not the machine's memory."""
    with_limit(machine, 5 * GIB)
    finding = found_by(memory.checks(machine.surroundings()), "memory.room")
    assert (finding.state, finding.found) == (State.OK, "5.0 GiB may be taken (limited by /sys/fs/cgroup)")


def test_less_room_than_the_settings_ask_for_is_a_failure_of_the_host_arena(machine: MadeUpMachine) -> None:
    """The service would not start; arenas on devices take no memory of the host."""
    with_limit(machine, 5 * GIB)
    settings = Settings.model_validate({"memory": "6GiB"})
    finding = found_by(memory.checks(machine.surroundings(settings=settings)), "memory.room")
    assert (finding.state, set(finding.needed_by)) == (State.FAIL, {ArenaKind.HOST})
    assert "asks for 6.0 GiB" in finding.found
    on_devices = machine.surroundings(settings=settings, arena=ArenaKind.CUDA_IPC)
    assert found_by(memory.checks(on_devices), "memory.room").state is State.OK


def test_less_room_than_the_processes_need_is_warned_of(machine: MadeUpMachine) -> None:
    """The container would be killed at its start."""
    with_limit(machine, GIB // 8)
    finding = found_by(memory.checks(machine.surroundings(environment={"container": "docker"})), "memory.room")
    assert finding.state is State.WARN
    assert "docker run --memory" in finding.remedy


def test_memory_that_nobody_owns_is_told_with_its_holders(machine: MadeUpMachine) -> None:
    """The next pool may not fit beside it."""
    machine.write("proc/77/maps", "7f0000000000-7f0000100000 rw-s 00000000 00:01 4242 /memfd:kvharbor (deleted)\n")
    (machine.root / "proc/77/fd").mkdir()
    finding = found_by(memory.checks(machine.surroundings()), "memory.left_behind")
    assert (finding.state, finding.found) == (
        State.WARN,
        "processes map 1.0 MiB of arenas whose owner is gone, by pid 77: 1048576 bytes (1.0 MiB)",
    )
