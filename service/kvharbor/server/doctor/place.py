"""Where the process runs: on a plain host, in a container or in a pod; and which namespaces it has of its own."""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvharbor.server.doctor.check import Check, Outcome, ok, warn

if TYPE_CHECKING:
    from kvharbor.server.doctor.surroundings import Surroundings

# The kernel gives the namespaces that it starts with fixed inodes (linux/proc_ns.h).
_INITIAL_INODES: Final = {"ipc": 0xEFFFFFFF, "pid": 0xEFFFFFFC, "cgroup": 0xEFFFFFFB}
_CONTAINER_WORDS: Final = ("docker", "containerd", "kubepods", "libpod", "crio", "lxc")
_PAUSE: Final = "pause"
"""The program that is process 1 of a pod whose containers share one PID namespace."""

SHARED_PIDS: Final = {
    "host": "run service and workers in one PID namespace",
    "container": "start the workers with --pid=container:NAME of the service's container, or all with --pid=host",
    "pod": "set shareProcessNamespace: true in the pod, or hostPID: true",
}
"""By place, how service and workers come to see each other's pids."""


class Place(StrEnum):
    """Decides how remedies are worded."""

    HOST = "host"
    CONTAINER = "container"
    POD = "pod"


def place_of(root: Path, environment: Mapping[str, str]) -> Place:
    """Tells where this process runs; `root` is where proc and the marks of container runtimes are found."""
    if "KUBERNETES_SERVICE_HOST" in environment or (root / "var/run/secrets/kubernetes.io").exists():
        return Place.POD
    marks = (root / ".dockerenv", root / "run/.containerenv")
    if any(mark.exists() for mark in marks) or environment.get("container"):
        return Place.CONTAINER
    if not all(_is_the_hosts(root, kind) for kind in ("pid", "cgroup")):
        return Place.CONTAINER
    groups = _of_first_process(root, "cgroup")
    return Place.CONTAINER if any(word in groups for word in _CONTAINER_WORDS) else Place.HOST


def checks(around: "Surroundings") -> Iterator[Check]:
    """Yields the checks of this topic."""
    yield Check("place.kind", lambda: _kind(around))
    yield Check("place.pid_namespace", lambda: _pid_namespace(around))
    yield Check("place.ipc_namespace", lambda: _ipc_namespace(around.root))


def _kind(around: "Surroundings") -> Outcome:
    if _is_wsl(around.root):
        return warn(
            "Windows Subsystem for Linux",
            "use the arena host: CUDA shares no memory between processes here; or run Linux itself",
        )
    return ok({Place.HOST: "a plain host", Place.CONTAINER: "a container", Place.POD: "a Kubernetes pod"}[around.place])


def _pid_namespace(around: "Surroundings") -> Outcome:
    if _is_the_hosts(around.root, "pid"):
        return ok("the host's")
    if _of_first_process(around.root, "comm").strip() == _PAUSE:
        return ok("shared by the pod's containers")
    return warn(
        "a namespace of its own: with cuda_ipc a worker in another container is refused where its pid happens to be "
        "that of the memory's owner, and before Linux 6.5 no worker of another container can be let in",
        f"{SHARED_PIDS[around.place]}; or use --arena cuda_vmm, which does not compare pids",
    )


def _ipc_namespace(root: Path) -> Outcome:
    whose = "the host's" if _is_the_hosts(root, "ipc") else "a namespace of its own"
    return ok(f"{whose}: does not matter, nothing here uses System V memory or CUDA's IPC events")


def _of_first_process(root: Path, name: str) -> str:
    """Returns what proc shows of process 1; nothing where other users' processes are hidden."""
    try:
        return (root / "proc/1" / name).read_text()
    except (FileNotFoundError, PermissionError):
        return ""


def _is_the_hosts(root: Path, kind: str) -> bool:
    """Tells whether the namespace is the one that the kernel started with, or the kernel knows none of that kind."""
    link = root / "proc/self/ns" / kind
    try:
        target = str(link.readlink())
    except FileNotFoundError:
        return True
    return target == f"{kind}:[{_INITIAL_INODES[kind]}]"


def _is_wsl(root: Path) -> bool:
    return "microsoft" in (root / "proc/version").read_text().lower()
