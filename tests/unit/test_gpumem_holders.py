"""Who still maps arenas that their owner has left."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvharbor.gpumem import HostArena, InsufficientMemory, LeftMemory, left_memory

SIZE_BYTES = 1 << 16


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    """A root with this process alone, in which nothing goes meanwhile that earlier tests have left as garbage."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / str(os.getpid())).symlink_to(f"/proc/{os.getpid()}")
    gc.collect()
    gc.disable()
    yield tmp_path
    gc.enable()


def test_memory_is_left_when_its_owner_is_gone_and_a_mapping_is_not(here: Path) -> None:
    """An owner's descriptor makes it owned; the last mapping's end makes it free."""
    before = left_memory(here).held_bytes
    arena = HostArena.create(SIZE_BYTES, name="kvharbor-left")
    first, second = arena.map(), arena.map()
    assert left_memory(here).held_bytes == before
    arena.close()
    left = left_memory(here)
    assert dict(left.shares)[os.getpid()] >= 2 * SIZE_BYTES
    assert left.held_bytes - before == 2 * SIZE_BYTES
    second.vacate()
    assert left_memory(here).held_bytes - before == SIZE_BYTES
    first.close()
    second.close()
    assert left_memory(here).held_bytes == before


def _process(root: Path, pid: int, *, maps: str, readable: bool = True) -> None:
    folder = root / "proc" / str(pid)
    (folder / "fd").mkdir(parents=True)
    if readable:
        (folder / "maps").write_text(maps)


def test_an_arena_that_many_map_counts_once(tmp_path: Path) -> None:
    """And processes that are gone, or another's, or map something else, are none."""
    arena = "7f0000000000-7f0000010000 rw-s 00000000 00:01 77 /memfd:kvharbor-p (deleted)\n"
    other = "7f0000000000-7f0000020000 rw-s 00000000 00:01 78 /memfd:kvharbor-q (deleted)\n"
    _process(tmp_path, 30, maps=arena)
    _process(tmp_path, 4, maps=arena + other + "7f1000000000-7f1000001000 r--p 00000000 08:01 5 /usr/lib/libc.so\n")
    _process(tmp_path, 5, maps="", readable=False)
    (tmp_path / "proc" / "self").mkdir()
    assert left_memory(tmp_path) == LeftMemory(0x30000, ((4, 0x30000), (30, 0x10000)))


@pytest.mark.parametrize(
    ("pids", "expected"),
    [
        ((7,), "7: 512 bytes"),
        ((3, 5), "3: 512 bytes, 5: 512 bytes"),
        (tuple(range(18)), ", ".join(f"{pid}: 512 bytes" for pid in range(16)) + " and 2 more"),
    ],
)
def test_a_long_list_of_processes_is_cut(pids: tuple[int, ...], expected: str) -> None:
    """An error has at most 4 KiB of details."""
    assert LeftMemory(512, tuple((pid, 512) for pid in pids)).held_by == expected


def test_a_refusal_names_them() -> None:
    """Every value of the message is in the metadata too."""
    refusal = InsufficientMemory(10, available_bytes=7, limited_by="MemAvailable").beside(6, "12: 6 bytes")
    assert refusal.metadata() == {
        "neededBytes": "10",
        "availableBytes": "7",
        "limitedBy": "MemAvailable",
        "heldBytes": "6",
        "heldBy": "12: 6 bytes",
    }
    assert "processes still map 6 bytes of an earlier epoch (12: 6 bytes)" in str(refusal)
