"""Socket paths that gRPC would read as something else."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import StartService
from integration.client_worker import LAYOUT, pool_size
from kvharbor.client import aio, connect

pytestmark = pytest.mark.slow


def test_a_path_is_taken_as_it_is_written(start_fresh: StartService, tmp_path: Path) -> None:
    """gRPC decodes %, and takes ? and # for the end of a path: both clients, tools and `exec` get there."""
    folder = tmp_path / "50%25 a?b#c"
    folder.mkdir()
    path = str(start_fresh(socket=folder / "kv.sock").socket)

    async def asynchronous() -> str:
        async with await aio.connect(path) as harbor:
            return (await harbor.server_info()).epoch

    with connect(f"unix:{path}") as harbor:
        harbor.open_pool("main", LAYOUT, pool_size(1))
        assert harbor.server_info().epoch == asyncio.run(asynchronous())
    tool = [sys.executable, "-m", "kvharbor.server.cli"]
    assert subprocess.run([*tool, "health", "--socket", path], capture_output=True, check=False).returncode == 0
    show = [sys.executable, "-c", "import os; print(os.environ['KVHARBOR_SOCKET'])"]
    command = [*tool, "exec", "--pool", "main", "--socket", path, "--", *show]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"{path}\n"
