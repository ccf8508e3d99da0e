"""F6 on a device: a worker still maps the memory of a service that has died, and the next one's does not fit beside it.

On the stub of the driver, which counts what processes have mapped, as a device does; not seen on hardware.
"""

from pathlib import Path

import pytest

import cuda_stub
from kvharbor.v1 import pool_service_pb2 as pools
from raw_caller import BLOCK_BYTES, RawCaller, refused, small_layout
from service_process import ServiceProcess
from session_worker import SessionWorker

pytestmark = pytest.mark.slow

DEVICE_BYTES = 64 * 2**20
POOL_BYTES = 40 * 2**20
ATTACH = """
from device_memory import attached
os.environ["KVHARBOR_CUDA_RUNTIME"] = "driver"
pool_id = caller.open_pool("p", block_count=blocks)
memory = attached(caller.side, pool_id)
memory.write(1, bytes(raw.BLOCK_BYTES))
"""


@pytest.mark.parametrize("kind", ["cuda_vmm", "cuda_ipc"])
def test_f6_memory_that_a_worker_still_maps_is_refused_until_it_lets_go(kind: str, tmp_path: Path) -> None:
    """The next service starts; the refusal says what may have the memory; there is one pool in the end."""
    uuid = cuda_stub.new_uuid()
    environment = cuda_stub.environment([uuid], device_bytes=DEVICE_BYTES)
    flags = [f"--arena={kind}", "--cuda-runtime=driver", f"--memory={POOL_BYTES}B"]
    path = tmp_path / "kv.sock"
    with ServiceProcess(path, *flags, environment=environment) as service:
        service.wait_for("ready")
        with SessionWorker(path, environment=environment) as worker:
            worker.run(ATTACH, blocks=POOL_BYTES // BLOCK_BYTES - 1)
            service.kill()
            with ServiceProcess(path, *flags, environment=environment) as following:
                following.wait_for("ready")
                opening = pools.OpenPoolRequest(name="p", layout=small_layout(), size_bytes=POOL_BYTES)
                with RawCaller(str(path)) as caller:
                    with refused() as found:
                        caller.call(caller.pools.OpenPool, opening)
                    assert found[0].reason == "INSUFFICIENT_MEMORY"
                    assert found[0].metadata["limitedBy"] == f"device {uuid}"
                    assert int(found[0].metadata["availableBytes"]) < POOL_BYTES
                    assert "workers that still map memory of an earlier epoch" in found[0].message
                    worker.run("memory.mapped.vacate()")
                    assert caller.call(caller.pools.OpenPool, opening).created
                assert following.stop() == 0
