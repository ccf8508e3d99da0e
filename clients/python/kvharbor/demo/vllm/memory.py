"""What of a pool's memory and of its own an engine has, as the kernel tells."""

import re
from dataclasses import dataclass
from pathlib import Path

ARENA = "/memfd:kvharbor"
_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ (\S+ \d+) *(.*)$")
_KIB = 1024


@dataclass(frozen=True, slots=True)
class ArenaMapping:
    """The largest piece of the service's memory that a process maps.

    `file` is its device and inode: the same in two processes if it is the same memory. `resident_bytes` are those that
    the process has touched, `share_bytes` the same with each page divided by the number of processes that have.
    """

    file: str
    size_bytes: int
    resident_bytes: int
    share_bytes: int


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """A process's own memory, which no other has, and its mapping of the pool; None where it has none."""

    private_bytes: int
    arena: ArenaMapping | None


def process_memory(pid: int, root: Path = Path("/proc")) -> ProcessMemory:
    """Reads what the kernel says of a process."""
    status = (root / str(pid) / "status").read_text()
    found = re.search(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
    assert found is not None
    arenas = _arenas((root / str(pid) / "smaps").read_text())
    largest = max(arenas, key=lambda arena: arena.size_bytes, default=None)
    return ProcessMemory(int(found[1]) * _KIB, largest)


def allocated_bytes(file: str, pids: list[int], root: Path = Path("/proc")) -> int:
    """Returns how much memory such a file takes, whoever maps it. One of the processes has to have it open."""
    inode = int(file.split()[1])
    for pid in pids:
        for entry in (root / str(pid) / "fd").iterdir():
            try:
                status = entry.stat()
            except OSError:
                # A descriptor that was closed meanwhile, or a socket.
                continue
            if status.st_ino == inode and str(entry.readlink()).startswith(ARENA):
                return status.st_blocks * 512
    raise LookupError(f"nobody of {pids} has {file} open")


def _arenas(smaps: str) -> list[ArenaMapping]:
    found: list[ArenaMapping] = []
    inside = ("", 0)
    amounts: dict[str, int] = {}
    for line in [*smaps.splitlines(), "0-0 - - 0 0 "]:
        if mapping := _MAPPING.match(line):
            if inside[0]:
                found.append(ArenaMapping(inside[0], inside[1], amounts["Rss"], amounts["Pss"]))
            start, end, file, path = mapping.groups()
            inside = (file, int(end, 16) - int(start, 16)) if path.startswith(ARENA) else ("", 0)
            amounts = {}
        elif inside[0] and line.endswith(" kB"):
            name, amount, _ = line.split()
            amounts[name.removesuffix(":")] = int(amount) * _KIB
    return found
