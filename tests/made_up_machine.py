"""A made-up machine for `kvharbor doctor`: proc, sys and dev as a plain host has them, to be changed by a test."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvharbor.gpumem.arena import ArenaKind
from kvharbor.server.configuration.settings import Settings
from kvharbor.server.doctor.check import Check, Finding
from kvharbor.server.doctor.place import place_of
from kvharbor.server.doctor.surroundings import Surroundings

GIB = 2**30

_PLAIN_HOST = {
    "proc/version": "Linux version 6.18.0 (gcc) #1 SMP\n",
    "proc/meminfo": f"MemAvailable: {100 * GIB // 1024} kB\n",
    "proc/1/cgroup": "0::/init.scope\n",
    "proc/1/comm": "systemd\n",
    "proc/self/cgroup": "0::/\n",
    "proc/self/mountinfo": "22 1 0:5 / /proc rw - proc proc rw\n",
    "proc/self/limits": (
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        "Max open files            1024                 524288               files     \n"
        "Max locked memory         unlimited            unlimited            bytes     \n"
    ),
    "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size [advise] never deny force\n",
}
_NAMESPACES = {"ipc": 4026531839, "pid": 4026531836, "cgroup": 4026531835}


@dataclass(frozen=True, slots=True)
class MadeUpMachine:
    """Files below `root`, and what a check finds with them."""

    root: Path

    @classmethod
    def plain_host(cls, root: Path) -> "MadeUpMachine":
        machine = cls(root)
        for path, content in _PLAIN_HOST.items():
            machine.write(path, content)
        for kind, inode in _NAMESPACES.items():
            machine.set_namespace(kind, inode)
        return machine

    def write(self, path: str, content: str) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content)

    def set_namespace(self, kind: str, inode: int) -> None:
        link = self.root / "proc/self/ns" / kind
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(f"{kind}:[{inode}]")

    def surroundings(
        self,
        *,
        environment: Mapping[str, str] | None = None,
        settings: Settings | None = None,
        arena: ArenaKind = ArenaKind.HOST,
        socket: str | None = None,
        attach: bool = False,
        settings_failure: str = "",
    ) -> Surroundings:
        """What the checks are given."""
        variables = environment or {}
        return Surroundings(
            root=self.root,
            environment=variables,
            place=place_of(self.root, variables),
            settings=settings or Settings(),
            settings_failure=settings_failure,
            arena=arena,
            socket=socket,
            attach=attach,
        )


def found_by(checks: Iterable[Check], name: str) -> Finding:
    """Returns what the one check of that name finds."""
    (check,) = [check for check in checks if check.name == name]
    return check.finding()
