"""Whose turn it is when several workers of pytest-xdist test on one machine; `alone` marks what measures time.

A file goes as a whole to the next worker that is free. What takes long comes first, lest one worker waits for another
in the end; what has to be alone comes last, when few others are left that have to wait for it.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_FOLDER = Path(__file__).parents[1] / "build" / "turns"


def arrange(items: list[pytest.Item]) -> None:
    """Sorts tests by file: first those with timeouts of their own, then slow ones, last those with tests `alone`."""

    def files(mark: str) -> set[Path]:
        return {item.path for item in items if item.get_closest_marker(mark)}

    alone, long, slow = files("alone"), files("timeout"), files("slow")
    items.sort(key=lambda item: (item.path in alone, item.path not in long, item.path not in slow))


@contextmanager
def turn(*, alone: bool, folder: Path = _FOLDER) -> Iterator[None]:
    """Waits until no test runs that is `alone`, or no test at all if this one is; others wait for it likewise."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "queue").open("w") as queue, (folder / "room").open("w") as room:
        fcntl.flock(queue, fcntl.LOCK_EX)  # nobody overtakes who waits to be alone
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(queue, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(room, fcntl.LOCK_UN)  # which a child that the test has forked still has open
