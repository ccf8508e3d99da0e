"""Case F1: a pool larger than the memory there is, with a memory cgroup around the process.

A memfd's fallocate does not fail beyond a cgroup's limit: the kernel kills. So these tests run only inside a
small cgroup of their own, and show that the check refuses first.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from memory_cgroup import Cgroup, memory_cgroup
from waiting import quickest, seconds

pytestmark = [pytest.mark.root, pytest.mark.slow]

MIB = 2**20
LIMIT_BYTES = 128 * MIB
BLOCK_BYTES = 2 * MIB

# Sizes are relative to what fits, which only the process inside can measure. A MiB on either side of it
# covers what its own few allocations change meanwhile.
CHILD = """
import json, sys
from kvharbor.gpumem import HostArena, InsufficientMemory, memory_room
from kvharbor.gpumem.host import headroom_bytes

room_bytes = memory_room().available_bytes
fits_bytes = room_bytes - headroom_bytes(room_bytes) - 2**20
size_bytes = fits_bytes + int(sys.argv[1])
with HostArena.create(size_bytes) as arena:
    try:
        arena.reserve()
    except InsufficientMemory as refusal:
        print(json.dumps({"size_bytes": size_bytes, "reserved_bytes": arena.reserved_bytes,
                          "refusal": refusal.metadata(), "message": str(refusal)}))
    else:
        with arena.map() as mapping:
            for first in range(0, size_bytes, 4096):
                mapping.buffer[first] = 1
            print(json.dumps({"size_bytes": size_bytes, "reserved_bytes": arena.reserved_bytes}))
"""


@pytest.fixture
def cgroup() -> Iterator[Cgroup]:
    with memory_cgroup(LIMIT_BYTES) as made:
        yield made


def run(cgroup: Cgroup, *arguments: str) -> dict[str, object]:
    """Runs CHILD in the cgroup; returns what it printed."""
    done = cgroup.execute(sys.executable, "-c", CHILD, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    printed: dict[str, object] = json.loads(done.stdout)
    return printed


def test_f1_an_arena_far_over_the_limit_is_refused_with_needed_and_available(cgroup: Cgroup) -> None:
    """F1, too large: both numbers and the limiting cgroup are named, nothing is taken, nobody is killed."""
    report = run(cgroup, str(10 * LIMIT_BYTES))
    refusal = report["refusal"]
    assert isinstance(refusal, dict)
    assert refusal["neededBytes"] == str(report["size_bytes"])
    assert 0 < int(refusal["availableBytes"]) < LIMIT_BYTES
    assert refusal["limitedBy"] == str(cgroup.path)
    for value in refusal.values():
        assert value in str(report["message"])
    assert report["reserved_bytes"] == 0
    assert cgroup.kill_count() == 0


def test_f1_an_arena_one_block_over_what_fits_is_refused(cgroup: Cgroup) -> None:
    """F1, one block more: refused before the first byte, nobody is killed."""
    report = run(cgroup, str(BLOCK_BYTES))
    assert "refusal" in report
    assert report["reserved_bytes"] == 0
    assert cgroup.kill_count() == 0


def test_f1_an_arena_that_exactly_fits_starts_and_every_byte_can_be_touched(cgroup: Cgroup) -> None:
    """F1, exactly fits: all pages are there from the start, so no later touch is a bus error or a kill."""
    report = run(cgroup, "0")
    assert report["reserved_bytes"] == report["size_bytes"]
    assert int(str(report["size_bytes"])) > LIMIT_BYTES // 4
    assert cgroup.kill_count() == 0


def test_f1_a_service_over_the_limit_does_not_start(cgroup: Cgroup, tmp_path: Path) -> None:
    """F1: one line names what is needed, what is there and which cgroup sets the limit; no file is left."""
    flags = [f"--socket={tmp_path}/kv.sock", "--memory=1GiB"]
    tried = []

    def start() -> None:
        tried.append(cgroup.execute(sys.executable, "-m", "kvharbor.server.cli", "serve", *flags))

    assert quickest(lambda: seconds(start), 5) < 5
    done = tried[-1]
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert f"needs {2**30} bytes" in line
    assert str(cgroup.path) in line
    assert list(tmp_path.iterdir()) == []
    assert cgroup.kill_count() == 0
