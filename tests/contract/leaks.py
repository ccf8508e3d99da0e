"""A fixture that fails the test which leaves a descriptor or a mapped arena behind."""

import gc
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from process_tree import open_files

ARENA_NAMES = ("/memfd:kvharbor", "/memfd:kvstub")
"""What host arenas, and all memory of the stub's devices, are called in /proc."""


def open_descriptors() -> dict[str, str]:
    """Open descriptors of this process and what each of them is."""
    return {entry.name: file for entry, file in open_files(os.getpid()).items()}


def mapped_arenas() -> list[str]:
    """The lines of this process's memory map that are arenas."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if any(name in line for name in ARENA_NAMES)]


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fails the test that leaves a descriptor open or an arena mapped."""
    gc.collect()  # views in a reference cycle keep their mapping, those of earlier tests too
    descriptors, arenas = _kinds(), mapped_arenas()
    yield
    if mapped_arenas() != arenas:
        gc.collect()
    assert _kinds() - descriptors == Counter()
    assert mapped_arenas() == arenas


def _kinds() -> Counter[str]:
    """How many descriptors are open of each kind.

    Not which: gRPC, if a test before has left it idle, makes its eventfds anew when the process forks.
    """
    return Counter(open_descriptors().values())
