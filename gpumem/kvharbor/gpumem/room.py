"""How much memory this process may still take before the kernel starts killing.

Reserving a memfd beyond what there is does not fail: the out-of-memory killer ends processes, innocent ones
first. So the room is computed before anything is reserved [M4]: the least of the machine's MemAvailable and, for
the process's memory cgroup and each of its ancestors, the limit less the use. Both cgroup versions count.

A tmpfs directory needs no check of its own here: arenas are memfds, which are charged to the cgroup and not
to /dev/shm or an emptyDir.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from kvharbor.gpumem.errors import InsufficientMemory


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """What may still be taken, and what sets that limit: "MemAvailable" or the path of a cgroup."""

    available_bytes: int
    limited_by: str


@dataclass(frozen=True, slots=True)
class _CgroupFiles:
    """The names that one cgroup version gives to limits, use and reclaimable page cache (descendants too)."""

    limits: tuple[str, ...]
    usage: str
    reclaimable: str


# Beyond memory.high nothing is killed, but the process is throttled to a standstill: a limit all the same.
_VERSION_2 = _CgroupFiles(("memory.max", "memory.high"), "memory.current", "inactive_file")
_VERSION_1 = _CgroupFiles(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")


def memory_room(root: Path = Path("/")) -> MemoryRoom:
    """Measures the room of this process now; `root` is where proc and sys are found."""
    rooms = [MemoryRoom(_mem_available_bytes(root), "MemAvailable")]
    for files, mount, group in _memory_cgroups(root):
        for ancestor in (group, *group.parents):
            directory = mount / ancestor.relative_to("/")
            available_bytes = _cgroup_room_bytes(root / directory.relative_to("/"), files)
            if available_bytes is not None:
                rooms.append(MemoryRoom(available_bytes, str(directory)))
    least = min(rooms, key=lambda room: room.available_bytes)
    return MemoryRoom(max(least.available_bytes, 0), least.limited_by)


def require_room(needed_bytes: int, headroom_bytes: int = 0, *, root: Path = Path("/")) -> None:
    """Raises InsufficientMemory unless `needed_bytes` fit and `headroom_bytes` are left beside them."""
    room = memory_room(root)
    available_bytes = max(room.available_bytes - headroom_bytes, 0)
    if needed_bytes > available_bytes:
        raise InsufficientMemory(needed_bytes, available_bytes=available_bytes, limited_by=room.limited_by)


def _mem_available_bytes(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise OSError("this kernel's /proc/meminfo has no MemAvailable (Linux 3.14 or newer is needed)")


def _memory_cgroups(root: Path) -> Iterator[tuple[_CgroupFiles, PurePosixPath, PurePosixPath]]:
    """Yields (files, mount point, path of this process below it) of every mounted memory hierarchy."""
    own_paths = _own_cgroup_paths(root)
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        mounted, _, filesystem = line.partition(" - ")
        kind, _, options = filesystem.split(maxsplit=2)
        if kind == "cgroup2":
            files, own = _VERSION_2, own_paths.get("")
        elif kind == "cgroup" and "memory" in options.split(","):
            files, own = _VERSION_1, own_paths.get("memory")
        else:
            continue
        if own is not None:
            shown_root, mount_point = (_unescaped(field) for field in mounted.split()[3:5])
            yield files, PurePosixPath(mount_point), _below(PurePosixPath(shown_root), own)


def _own_cgroup_paths(root: Path) -> dict[str, PurePosixPath]:
    """The cgroup of this process by controller; version 2 has the empty name."""
    paths: dict[str, PurePosixPath] = {}
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", maxsplit=2)
        for controller in controllers.split(","):
            paths[controller] = PurePosixPath(path)
    return paths


def _below(shown_root: PurePosixPath, own: PurePosixPath) -> PurePosixPath:
    """The process's path as seen under a mount that shows only `shown_root` of the hierarchy."""
    # A container may be shown its own cgroup as the mount's root while its path names the host's; and a
    # process outside its cgroup namespace has a path that climbs. What is not visible cannot be checked.
    if ".." in own.parts or not own.is_relative_to(shown_root):
        return PurePosixPath("/")
    return PurePosixPath("/") / own.relative_to(shown_root)


def _cgroup_room_bytes(directory: Path, files: _CgroupFiles) -> int | None:
    """Limit less use plus reclaimable page cache; None where there is no limit (the root, or not mounted)."""
    limits = [_read_bytes(directory / name) for name in files.limits]
    usage_bytes = _read_bytes(directory / files.usage)
    bounds = [limit for limit in limits if limit is not None]
    if not bounds or usage_bytes is None:
        return None
    return min(bounds) - usage_bytes + _reclaimable_bytes(directory / "memory.stat", files.reclaimable)


def _read_bytes(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except FileNotFoundError:
        return None
    return None if text == "max" else int(text)


def _reclaimable_bytes(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[0] == name), 0)


def _unescaped(field: str) -> str:
    # mountinfo writes blanks and backslashes as three octal digits.
    return field.encode().decode("unicode_escape").encode("latin-1").decode(errors="surrogateescape")
