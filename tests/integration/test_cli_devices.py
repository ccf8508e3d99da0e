"""`kvharbor exec` where pools lie on devices, on the stub of the driver."""

import os
import subprocess
import sys

import pytest

import cuda_stub
from conftest import StartService
from kvharbor.v1 import pool_service_pb2 as pools
from raw_caller import RawCaller

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("arena", ["cuda_ipc", "cuda_vmm"])
def test_exec_refuses_memory_that_is_no_one_descriptor(arena: str, start_fresh: StartService) -> None:
    """Before the command is run or its session opens the pool; one line says which arena it is and what to use."""
    environment = cuda_stub.environment([cuda_stub.new_uuid()])
    service = start_fresh(environment=environment, arena=arena, cuda_runtime="driver", memory="32MiB")
    command = [sys.executable, "-m", "kvharbor.server.cli", "exec", "--pool", "p", "--", "echo", "ran"]
    with RawCaller(str(service.socket)) as caller:
        pool_id = caller.open_pool("p", block_count=4)
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
            env={**os.environ, "KVHARBOR_SOCKET": str(service.socket)},
        )
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"kvharbor: pool 'p' is in memory of the arena {arena}, ")
        assert "clients/python or clients/cpp" in done.stderr
        # Nobody else has it open.
        caller.call(caller.pools.DropPool, pools.DropPoolRequest(pool_id=pool_id))
