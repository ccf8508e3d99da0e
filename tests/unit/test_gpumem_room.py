"""How much memory may be taken, from made-up proc and sys trees."""

from pathlib import Path

import pytest

from kvharbor.gpumem import InsufficientMemory, MemoryRoom, memory_room, require_room

GIB = 2**30
UNLIMITED_V1 = str(2**63 - 4096)


class Machine:
    """A made-up machine: /proc of this process and any number of cgroup folders."""

    def __init__(self, root: Path, *, available_bytes: int = 100 * GIB) -> None:
        self.root = root
        (root / "proc/self").mkdir(parents=True)
        self.write("proc/meminfo", f"MemTotal: 1 kB\nMemFree: 2 kB\nMemAvailable: {available_bytes // 1024} kB\n")
        self.write("proc/self/mountinfo", "22 1 0:5 / /proc rw - proc proc rw\n")
        self.write("proc/self/cgroup", "")

    def write(self, path: str, content: str) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content)

    def mount(self, line: str) -> None:
        with (self.root / "proc/self/mountinfo").open("a") as mounts:
            mounts.write(line + "\n")

    def group_v2(self, path: str, *, limit: str, usage_bytes: int, inactive_file_bytes: int = 0) -> None:
        self.write(f"{path}/memory.max", f"{limit}\n")
        self.write(f"{path}/memory.current", f"{usage_bytes}\n")
        self.write(f"{path}/memory.stat", f"anon 5\ninactive_file {inactive_file_bytes}\nactive_file 7\n")

    def group_v1(self, path: str, *, limit: str, usage_bytes: int, inactive_file_bytes: int = 0) -> None:
        self.write(f"{path}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{path}/memory.usage_in_bytes", f"{usage_bytes}\n")
        self.write(f"{path}/memory.stat", f"inactive_file 1\ntotal_inactive_file {inactive_file_bytes}\n")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def with_v2(machine: Machine, own: str, *, shown_root: str = "/") -> Machine:
    machine.write("proc/self/cgroup", f"0::{own}\n")
    machine.mount(f"30 1 0:26 {shown_root} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate")
    return machine


def with_v1(machine: Machine, own: str, *, shown_root: str = "/") -> Machine:
    machine.write("proc/self/cgroup", f"9:name=systemd:/\n4:cpu,memory:{own}\n0::/\n")
    machine.mount("31 1 0:27 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset")
    machine.mount(f"32 1 0:28 {shown_root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,cpu,memory")
    return machine


def test_without_cgroups_the_machine_is_the_limit(machine: Machine) -> None:
    """MemAvailable counts what the kernel can free without swapping."""
    assert memory_room(machine.root) == MemoryRoom(100 * GIB, "MemAvailable")


def test_the_tightest_ancestor_is_the_limit_in_version_2(machine: Machine) -> None:
    """A pod's limit binds although the container has none, and is named by its path."""
    with_v2(machine, "/kubepods/pod1/box")
    machine.group_v2("sys/fs/cgroup/kubepods", limit="max", usage_bytes=50 * GIB)
    machine.group_v2("sys/fs/cgroup/kubepods/pod1", limit=str(4 * GIB), usage_bytes=GIB)
    machine.group_v2("sys/fs/cgroup/kubepods/pod1/box", limit=str(8 * GIB), usage_bytes=GIB)
    assert memory_room(machine.root) == MemoryRoom(3 * GIB, "/sys/fs/cgroup/kubepods/pod1")


def test_the_tightest_ancestor_is_the_limit_in_version_1(machine: Machine) -> None:
    """The same with the older files, memory sharing its hierarchy with another controller."""
    with_v1(machine, "/docker/box")
    machine.group_v1("sys/fs/cgroup/memory", limit=UNLIMITED_V1, usage_bytes=70 * GIB)
    machine.group_v1("sys/fs/cgroup/memory/docker", limit=str(6 * GIB), usage_bytes=2 * GIB)
    machine.group_v1("sys/fs/cgroup/memory/docker/box", limit=UNLIMITED_V1, usage_bytes=GIB)
    assert memory_room(machine.root) == MemoryRoom(4 * GIB, "/sys/fs/cgroup/memory/docker")


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_that_is_shown_its_own_group_as_the_root_finds_its_limit(machine: Machine, version: int) -> None:
    """The path in /proc names the host's hierarchy, the mount shows only this container's part."""
    if version == 1:
        with_v1(machine, "/docker/box", shown_root="/docker/box")
        machine.group_v1("sys/fs/cgroup/memory", limit=str(2 * GIB), usage_bytes=GIB)
        assert memory_room(machine.root) == MemoryRoom(GIB, "/sys/fs/cgroup/memory")
    else:
        with_v2(machine, "/docker/box", shown_root="/docker/box")
        machine.group_v2("sys/fs/cgroup", limit=str(2 * GIB), usage_bytes=GIB)
        assert memory_room(machine.root) == MemoryRoom(GIB, "/sys/fs/cgroup")


def test_a_path_outside_the_cgroup_namespace_falls_back_to_what_is_visible(machine: Machine) -> None:
    """A process moved in from outside has a path that climbs; the visible root still counts."""
    with_v2(machine, "/../../elsewhere")
    machine.group_v2("sys/fs/cgroup", limit=str(GIB), usage_bytes=0)
    assert memory_room(machine.root) == MemoryRoom(GIB, "/sys/fs/cgroup")


def test_page_cache_that_can_be_dropped_is_room(machine: Machine) -> None:
    """A container that has read its model file is not full of it."""
    with_v2(machine, "/box")
    machine.group_v2("sys/fs/cgroup/box", limit=str(4 * GIB), usage_bytes=4 * GIB, inactive_file_bytes=3 * GIB)
    assert memory_room(machine.root).available_bytes == 3 * GIB


def test_descendants_page_cache_counts_in_version_1(machine: Machine) -> None:
    """Use and limit of a version 1 group include its descendants, so the cache must too."""
    with_v1(machine, "/box")
    machine.group_v1("sys/fs/cgroup/memory/box", limit=str(2 * GIB), usage_bytes=2 * GIB, inactive_file_bytes=GIB)
    assert memory_room(machine.root).available_bytes == GIB


def test_memory_high_is_a_limit_too(machine: Machine) -> None:
    """Beyond it nothing is killed, but the process is throttled to a standstill."""
    with_v2(machine, "/box")
    machine.group_v2("sys/fs/cgroup/box", limit="max", usage_bytes=GIB)
    machine.write("sys/fs/cgroup/box/memory.high", str(3 * GIB))
    assert memory_room(machine.root) == MemoryRoom(2 * GIB, "/sys/fs/cgroup/box")


def test_room_below_zero_is_none(machine: Machine) -> None:
    """Use may exceed a limit that was lowered."""
    with_v2(machine, "/box")
    machine.group_v2("sys/fs/cgroup/box", limit=str(GIB), usage_bytes=2 * GIB)
    assert memory_room(machine.root) == MemoryRoom(0, "/sys/fs/cgroup/box")


def test_a_mount_point_with_a_blank_is_found(machine: Machine) -> None:
    """mountinfo writes it as an octal escape."""
    machine.write("proc/self/cgroup", "0::/\n")
    machine.mount(r"30 1 0:26 / /run/cgroup\040two rw - cgroup2 none rw")
    machine.group_v2("run/cgroup two", limit=str(GIB), usage_bytes=0)
    assert memory_room(machine.root) == MemoryRoom(GIB, "/run/cgroup two")


def test_a_kernel_without_mem_available_is_an_error(machine: Machine) -> None:
    """Guessing would let the kernel kill."""
    machine.write("proc/meminfo", "MemTotal: 1 kB\n")
    with pytest.raises(OSError, match="MemAvailable"):
        memory_room(machine.root)


def test_a_need_beyond_the_room_is_refused_with_both_numbers_and_the_limiter(tmp_path: Path) -> None:
    """'needs X, have Y', what sets Y, and the headroom taken off Y."""
    machine = with_v2(Machine(tmp_path), "/box")
    machine.group_v2("sys/fs/cgroup/box", limit=str(2 * GIB), usage_bytes=GIB)
    require_room(GIB, root=machine.root)
    require_room(GIB - 10, 10, root=machine.root)
    with pytest.raises(InsufficientMemory) as raised:
        require_room(GIB, 10, root=machine.root)
    assert raised.value.metadata() == {
        "neededBytes": str(GIB),
        "availableBytes": str(GIB - 10),
        "limitedBy": "/sys/fs/cgroup/box",
    }
    assert f"needs {GIB} bytes (1.0 GiB), /sys/fs/cgroup/box leaves {GIB - 10} bytes" in str(raised.value)


def test_this_machine_has_room() -> None:
    """The real files are read without a complaint."""
    assert memory_room().available_bytes > 0
