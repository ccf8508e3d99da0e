"""F7: a service of root, and a worker that is not: closed by default, open as set, whatever the umask."""

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import StartService
from service_process import ServiceProcess

WORKER_UID = 65534
GROUP = 2000

WORKER = """
import sys
from kvharbor.client import ServiceUnreachable, connect
from kvharbor.gpumem import DataType, Layout

LAYOUT = Layout.attention("m", 1, 1, 16, DataType.FLOAT32, block_tokens=16)
try:
    with connect(sys.argv[1]) as harbor:
        pool = harbor.open_pool("p", LAYOUT, size="64KiB")
        with pool.allocate(range(32)) as sequence:
            pool.views.numpy("k", 0)[sequence.slots(0, 32)] = 7
            sequence.commit(32)
        print("present", pool.lookup(range(32)).present_tokens)
except ServiceUnreachable as refused:
    print(refused)
"""
# It may read everything, as the interpreter may lie where others cannot; to connect takes the right to write.
AS_WORKER = [
    "setpriv",
    f"--reuid={WORKER_UID}",
    f"--regid={WORKER_UID}",
    f"--groups={GROUP}",
    "--inh-caps=+dac_read_search",
    "--ambient-caps=+dac_read_search",
]

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be a service of root and then a worker that is not"),
]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that both may enter, on a path that all may walk."""
    with tempfile.TemporaryDirectory(prefix="kv", dir="/tmp") as path:
        folder = Path(path)
        os.chown(folder, 0, GROUP)
        folder.chmod(0o2750)
        yield folder


def worker_says(service: ServiceProcess) -> str:
    """Runs a worker as another user of the group; returns its line."""
    command = [*AS_WORKER, sys.executable, "-c", WORKER, str(service.socket)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.strip()


def access(path: Path) -> tuple[int, int, int]:
    """Returns mode, owner and group."""
    found = path.stat()
    return stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid


def test_by_default_a_worker_of_another_user_is_told_what_to_set(start_fresh: StartService, folder: Path) -> None:
    """F7 (a): path, mode, owner and the settings are in the message; nothing is open to group or world."""
    service = start_fresh(socket=folder / "a.sock")
    said = worker_says(service)
    assert said.startswith(f"uid {WORKER_UID} may not connect to {service.socket.with_suffix('.side')}")
    assert "mode 0600, uid 0, gid" in said
    assert "socket_mode and socket_group" in said
    assert [path for path in folder.iterdir() if stat.S_IMODE(path.stat().st_mode) & 0o077] == []


@pytest.mark.parametrize("umask", [0o022, 0o077, 0])
def test_with_mode_and_group_set_a_worker_maps_and_writes(start_fresh: StartService, folder: Path, umask: int) -> None:
    """F7 (b), (c): modes are those that are set, whatever the umask; a group may be given by number."""
    before = os.umask(umask)
    try:
        service = start_fresh(socket=folder / "a.sock", socket_mode="0660", socket_group=str(GROUP))
    finally:
        os.umask(before)
    assert access(service.socket) == access(service.socket.with_suffix(".side")) == (0o660, 0, GROUP)
    assert access(Path(f"{service.socket}.lock"))[0] == 0o600
    assert worker_says(service) == "present 32"


def test_a_folder_where_anybody_may_replace_the_sockets_is_warned_of(start_fresh: StartService, folder: Path) -> None:
    """F7 (d): a shared folder without the sticky bit."""
    folder.chmod(0o777)
    warning = start_fresh(socket=folder / "a.sock").wait_for("any user may replace the sockets")
    assert (warning["directory"], warning["mode"]) == (str(folder), "0777")
    assert "chmod +t" in warning["remedy"]
    folder.chmod(0o1777)
    assert start_fresh(socket=folder / "b.sock").entries("any user may replace the sockets") == []
