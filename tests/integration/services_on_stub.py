"""Services with pools on devices of the stub, and workers that map them."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import pytest

import cuda_stub
from conftest import StartService
from kvharbor.v1 import pool_service_pb2 as pools
from raw_caller import BLOCK_BYTES, RawCaller, small_layout
from service_process import ServiceProcess
from session_worker import SessionWorker

KINDS = ("cuda_vmm", "cuda_ipc")
DEVICE_BYTES = 64 * 2**20
PREPARE = """
from device_memory import attached, view
from kvharbor.v1 import cache_service_pb2 as cache
os.environ["KVHARBOR_CUDA_RUNTIME"] = "driver"

def fork(one):
    asked = cache.ForkRequest(pool_id=pool_id, sequence_id=one.sequence_id, child_count=1)
    return caller.call(caller.cache.Fork, asked).children[0]

def blocks(sequence):
    return [*memoryview(sequence.table.block_ids).cast("I")]
"""
OPEN = "pool_id = caller.open_pool('p', block_count=8); memory = attached(caller.side, pool_id)"
WRITE = "memory.write(block, bytes.fromhex(content))"
READ = "result = memory.read(block).hex()"
StartOnDevices = Callable[..., ServiceProcess]


@pytest.fixture
def start_on_stub(start_fresh: StartService) -> StartOnDevices:
    """Starts a service of the arena `kind` on devices of the stub. `faults` are the stub's; the rest are flags."""

    def started(
        kind: str, devices: list[str], /, *, faults: Mapping[str, str] = MappingProxyType({}), **flags: str
    ) -> ServiceProcess:
        flags = {"arena": kind, "cuda_runtime": "driver", "memory": "32MiB", **flags}
        return start_fresh(environment={**on_stub(devices), **faults}, **flags)

    return started


def on_stub(devices: Sequence[str], visible: str | None = None) -> dict[str, str]:
    """Returns the environment of a process on the stub with these devices, of which it sees `visible`."""
    return cuda_stub.environment(devices, device_bytes=DEVICE_BYTES, visible=visible)


def worker_on(service: ServiceProcess, devices: Sequence[str], visible: str | None = None) -> SessionWorker:
    """Returns a worker on the stub with these devices, of which it sees `visible`."""
    worker = SessionWorker(service.socket, environment=on_stub(devices, visible))
    worker.run(PREPARE)
    return worker


def come_back(caller: RawCaller, pool_id: str) -> None:
    """Goes on with a session that holds nothing, after the service's process was replaced."""
    caller.resume()
    caller.resume_pool(pool_id)


def info(caller: RawCaller) -> pools.GetServerInfoResponse:
    """Returns what the service says of itself."""
    response: pools.GetServerInfoResponse = caller.call(caller.pools.GetServerInfo, pools.GetServerInfoRequest())
    return response


def opening(name: str, size_bytes: int = 0, tp_size: int = 1, devices: Sequence[str] = ()) -> pools.OpenPoolRequest:
    """Returns the request for a pool."""
    layout = small_layout(tp_size=tp_size)
    return pools.OpenPoolRequest(name=name, layout=layout, size_bytes=size_bytes, devices=devices)


def devices_of(caller: RawCaller, request: pools.OpenPoolRequest) -> list[str]:
    """Opens a pool; returns where its parts lie."""
    return [part.device for part in caller.call(caller.pools.OpenPool, request).pool.parts]


def content(number: int) -> str:
    """Bytes of a block, in hexadecimal."""
    return (bytes([number]) * BLOCK_BYTES).hex()
