"""A small memory cgroup around processes, for tests of what happens where memory ends. Needs root."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True, slots=True)
class Cgroup:
    """A memory cgroup made for one test."""

    path: Path
    version: int

    def kill_count(self) -> int:
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        lines = (self.path / name).read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.split()[0] == "oom_kill")

    def execute(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """Runs a command in this cgroup, from its first instruction on, to its end."""
        enter = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
        return subprocess.run(
            ["sh", "-c", enter, str(self.path), *command],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def enter(self, pid: int) -> None:
        """Moves a process that has just started into the cgroup, and whatever it starts from now on."""
        (self.path / "cgroup.procs").write_text(str(pid))


@contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[Cgroup]:
    """Makes a cgroup for the time of the context, or skips the test with the exact reason why not."""
    parent, version = _parent_group()
    path = parent / f"kvharbor-test-{os.getpid()}"
    try:
        path.mkdir()
    except OSError as refusal:
        pytest.skip(f"cannot make a cgroup in {parent}: {refusal.strerror}")
    try:
        limit = "memory.max" if version == 2 else "memory.limit_in_bytes"
        (path / limit).write_text(str(limit_bytes))
        yield Cgroup(path, version)
    finally:
        path.rmdir()


def _parent_group() -> tuple[Path, int]:
    """Where a child memory cgroup can be made, or the exact reason why not as a skip."""
    if os.geteuid() != 0:
        pytest.skip("making a memory cgroup needs root")
    own_v1 = [line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line]
    v1 = Path("/sys/fs/cgroup/memory")
    if own_v1 and (v1 / "memory.limit_in_bytes").exists():
        path = v1 / own_v1[0].split(":", 2)[2].lstrip("/")
        return (path if path.exists() else v1), 1
    v2 = Path("/sys/fs/cgroup")
    control = v2 / "cgroup.subtree_control"
    if not control.exists():
        pytest.skip("no memory cgroup is mounted under /sys/fs/cgroup")
    if "memory" not in control.read_text().split():
        pytest.skip("/sys/fs/cgroup/cgroup.subtree_control does not enable the memory controller")
    return v2, 2
