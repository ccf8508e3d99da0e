"""What memory an engine has, and which its KV cache lies in, as the kernel tells."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ (\S+ \d+) *(.*)$")
_NO_FILE = "00:00 0"
_KIB = 1024


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Where a process has its KV cache, and how much memory is its own.

    `kv_files` are the device and inode of what is mapped where its KV cache lies, and its name: the same in two
    processes if it is the same memory, and nothing for memory of its own. Of that mapping, `kv_resident_bytes` are what
    the process has touched, `kv_share_bytes` the same with each page divided by the number of processes that have.
    `private_bytes` is memory that no other process has, without the heap: what is large is there only if as much was
    free in it in one piece, and the heap of two processes that do the same differs.
    """

    kv_files: tuple[str, ...]
    kv_bytes: int
    kv_resident_bytes: int
    kv_share_bytes: int
    private_bytes: int


@dataclass(frozen=True, slots=True)
class _Mapping:
    first: int
    end: int
    file: str
    name: str
    amounts: dict[str, int]


def process_memory(pid: int, kv_ranges: Sequence[tuple[int, int]], root: Path = Path("/proc")) -> ProcessMemory:
    """Reads what the kernel says of a process whose KV cache lies at these addresses."""
    mappings = [*_mappings((root / str(pid) / "smaps").read_text())]
    ours = [each for each in mappings if any(each.first < end and first < each.end for first, end in kv_ranges)]
    return ProcessMemory(
        kv_files=tuple(sorted({each.file for each in ours if each.file})),
        kv_bytes=sum(end - first for first, end in kv_ranges),
        kv_resident_bytes=sum(each.amounts["Rss"] for each in ours),
        kv_share_bytes=sum(each.amounts["Pss"] for each in ours),
        private_bytes=sum(each.amounts["Anonymous"] for each in mappings if each.name != "[heap]"),
    )


def allocated_bytes(file: str, pids: Sequence[int], root: Path = Path("/proc")) -> int:
    """Returns how much memory such a file takes, whoever maps it; one of the processes has to have it open."""
    inode = int(file.split()[1])
    for pid in pids:
        for entry in (root / str(pid) / "fd").iterdir():
            try:
                status, target = entry.stat(), str(entry.readlink())
            except OSError:
                # It was closed meanwhile.
                continue
            if status.st_ino == inode and target.startswith("/memfd:"):
                return status.st_blocks * 512
    raise LookupError(f"none of the processes {pids} has {file} open")


def _mappings(smaps: str) -> Iterator[_Mapping]:
    mapping: _Mapping | None = None
    for line in smaps.splitlines():
        if head := _MAPPING.match(line):
            if mapping:
                yield mapping
            first, end, file, name = head.groups()
            named = "" if file == _NO_FILE else f"{file} {name.removesuffix(' (deleted)')}"
            mapping = _Mapping(int(first, 16), int(end, 16), named, name, {})
        elif mapping and line.endswith(" kB"):
            name, amount, _ = line.split()
            mapping.amounts[name.removesuffix(":")] = int(amount) * _KIB
    if mapping:
        yield mapping
