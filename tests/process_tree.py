"""Processes as the kernel tells of them: their children, what they have open, and whether they live."""

import contextlib
from pathlib import Path

from waiting import until


def children_of(pid: int) -> list[int]:
    """Returns the children of a process's first thread; the list is empty once it is gone."""
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def open_files(pid: int) -> dict[Path, str]:
    """Returns what a process has open, by its entries in /proc; not what it closes meanwhile."""
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found[entry] = str(entry.readlink())
    return found


def has_ended(pid: int) -> bool:
    """Tells whether a process is gone, or waits for nothing but its parent to take note."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until_ended(pid: int) -> None:
    """Waits for the end of a process that is no child of this one."""
    until(lambda: has_ended(pid))
