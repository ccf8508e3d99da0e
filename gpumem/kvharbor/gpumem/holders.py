"""Who still has arenas in memory whose owner is gone.

A memfd lives as long as anybody maps it: when the owner of an arena has died, the processes that had it mapped keep its
memory, and the next owner may find no room beside it.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvharbor.gpumem.amounts import exact_size

_ARENA_NAME = "/memfd:kvharbor"
_LONGEST_LIST = 16


@dataclass(frozen=True, slots=True)
class LeftMemory:
    """Bytes of arenas that no process has a descriptor of, and how many of them each process maps, most first.

    Several may map the same ones: the shares sum to `held_bytes` or more.
    """

    held_bytes: int
    shares: tuple[tuple[int, int], ...]

    @property
    def held_by(self) -> str:
        """Process ids for people, each with what it maps, at most 16 of them."""
        shown = ", ".join(f"{pid}: {exact_size(share)}" for pid, share in self.shares[:_LONGEST_LIST])
        return shown if len(self.shares) <= _LONGEST_LIST else f"{shown} and {len(self.shares) - _LONGEST_LIST} more"


def left_memory(root: Path = Path("/")) -> LeftMemory:
    """Looks through every process that this one may look into; `root` is where proc is found.

    An owner has its arenas' descriptors and workers have closed theirs [M9]: what nobody has one of was left behind.
    """
    processes = [entry for entry in (root / "proc").iterdir() if entry.name.isdigit()]
    owned = {inode for process in processes for inode in _open_arenas(process)}
    held_bytes: dict[int, int] = {}
    shares: Counter[int] = Counter()
    for process in processes:
        for inode, size_bytes in _mapped_arenas(process).items():
            if inode not in owned:
                held_bytes[inode] = max(size_bytes, held_bytes.get(inode, 0))
                shares[int(process.name)] += size_bytes
    return LeftMemory(sum(held_bytes.values()), tuple(shares.most_common()))


def _open_arenas(process: Path) -> Iterator[int]:
    """Yields the inodes of the arenas that a process has descriptors of; none if it is gone or not ours to see."""
    try:
        for entry in (process / "fd").iterdir():
            if str(entry.readlink()).startswith(_ARENA_NAME):
                yield entry.stat().st_ino
    except OSError:
        return


def _mapped_arenas(process: Path) -> dict[int, int]:
    """The bytes that a process maps of each arena, by inode; none if it is gone or not ours to see."""
    sizes: dict[int, int] = {}
    try:
        lines = (process / "maps").read_text().splitlines()
    except OSError:
        return sizes
    for line in lines:
        if _ARENA_NAME in line:
            addresses, _, _, _, inode, _ = line.split(maxsplit=5)
            first, end = (int(address, 16) for address in addresses.split("-"))
            sizes[int(inode)] = sizes.get(int(inode), 0) + end - first
    return sizes
