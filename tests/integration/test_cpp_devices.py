"""The C++ client maps pools on devices, on the stub of the driver; never run on hardware."""

from collections.abc import Iterator

import pytest

import cuda_stub
from conftest import StartService
from cpp_worker import CppError, CppWorker
from integration.client_worker import LAYOUT, pool_size
from service_process import ServiceProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
DEVICE_BYTES = 64 * 2**20
TOKENS = range(100, 132)


@pytest.fixture(params=["cuda_vmm", "cuda_ipc"])
def service(request: pytest.FixtureRequest, device: str, start_fresh: StartService) -> ServiceProcess:
    """A service whose pools lie on the device."""
    environment = cuda_stub.environment([device], device_bytes=DEVICE_BYTES)
    return start_fresh(environment=environment, arena=request.param, cuda_runtime="driver", memory="32MiB")


def connected(service: ServiceProcess, *devices: str) -> CppWorker:
    """Returns a worker that sees these devices and has the pool open."""
    worker = CppWorker(cuda_stub.environment(devices, device_bytes=DEVICE_BYTES))
    worker.call("connect", service.socket, 10_000)
    worker.call("open", "p", LAYOUT.model, 1, pool_size(8))
    return worker


@pytest.fixture
def with_cuda() -> Iterator[None]:
    """Skips where the library was built without CUDA."""
    with CppWorker() as worker:
        if not worker.built_with_cuda():
            pytest.skip("the C++ client was built where CMake found no CUDA toolkit")
        yield


@pytest.mark.usefixtures("with_cuda")
def test_what_one_worker_writes_another_reads(service: ServiceProcess, device: str) -> None:
    """Byte for byte in either arena, with a partial tail that the service has copied, and through its death."""
    with connected(service, device) as writer, connected(service, device) as reader:
        writer.attach(0)
        writer.allocate("a", 0, 0, *TOKENS[:20])
        writer.stamp("a", 0, *range(20))
        assert writer.commit("a", 20) == 16
        writer.fork("a", "child")
        assert writer.read("child", 0, 20) == list(range(20))
        service.restart_child()
        reader.attach(0)
        assert reader.allocate("a", 0, 0, *TOKENS)["cached_tokens"] == 16
        assert reader.read("a", 0, 16) == list(range(16))
        reader.attach(0)
        assert reader.read("a", 0, 16) == list(range(16))


@pytest.mark.usefixtures("with_cuda")
def test_a_device_that_is_not_seen_is_named(service: ServiceProcess, device: str) -> None:
    """With what this process sees instead; without any it is the driver that says why."""
    other = cuda_stub.new_uuid()
    with connected(service, other) as worker:
        with pytest.raises(CppError) as refusal:
            worker.attach(0)
        assert refusal.value.reason == "DEVICE_NOT_VISIBLE"
        assert refusal.value.metadata["device"] == device
        assert other in refusal.value.metadata["visibleDevices"]
    with connected(service) as worker, pytest.raises(CppError) as refusal:
        worker.attach(0)
    assert refusal.value.reason == "DEVICE_FAILED"


def test_a_library_without_cuda_says_so(service: ServiceProcess, device: str) -> None:
    """With the remedy."""
    with connected(service, device) as worker:
        if worker.built_with_cuda():
            pytest.skip("the C++ client was built where CMake found the CUDA toolkit")
        with pytest.raises(CppError) as refusal:
            worker.attach(0)
        assert refusal.value.reason == "BUILT_WITHOUT_CUDA"
