"""F6 on a device: a worker still maps the memory of a service that has died, and the next one's does not fit beside it.

On the stub of the driver, which counts what processes have mapped, as a device does; not seen on hardware.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import cuda_stub
from kvharbor.v1 import errors_pb2
from kvharbor.v1 import pool_service_pb2 as pools
from raw_caller import BLOCK_BYTES, RawCaller, greeted, hello, refused, resuming, small_layout
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
result = [caller.welcome.session_token, caller.welcome.epoch]
"""
DECLARED = f"""
[pools.p]
size = "{POOL_BYTES}B"
[pools.p.layout]
model = "m"
block_tokens = 16
planes = [{{name = "k", layer_count = 1, data_type = "float32", head_count = 1, head_dim = 16}}]
"""
WAITS = "declared pool waits for memory that workers of an earlier epoch may have"


def kill_supervisor(service: ServiceProcess) -> None:
    """Kills it, and with it everything but the workers."""
    service.kill()


def stop(service: ServiceProcess) -> None:
    """Ends the service in order, whatever workers there are: the next one is not told that there was one."""
    assert service.stop() == 0


def kill_keeper(service: ServiceProcess) -> None:
    """Kills the process that has the device's memory: the supervisor makes a cold start."""
    os.kill(int(service.entries("keeper began")[-1]["pid"]), signal.SIGKILL)


def worker_of(service: ServiceProcess, environment: dict[str, str]) -> SessionWorker:
    """Returns a worker of a service, when that is ready."""
    service.wait_for("ready")
    return SessionWorker(service.socket, environment=environment)


def declaring(folder: Path, kind: str) -> list[str]:
    """Returns the flags of a service that declares a pool of which two do not fit on the device."""
    file = folder / "kvharbor.toml"
    file.write_text(DECLARED)
    return [f"--arena={kind}", "--cuda-runtime=driver", "--device-grace-s=0", f"--config={file}"]


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


@pytest.mark.parametrize(
    ("kind", "end"),
    [("cuda_vmm", kill_supervisor), ("cuda_ipc", kill_supervisor), ("cuda_vmm", stop), ("cuda_ipc", kill_keeper)],
)
def test_f6_a_declared_pool_waits_for_the_workers_to_let_go(
    kind: str, end: Callable[[ServiceProcess], None], tmp_path: Path
) -> None:
    """Who resumes is told of the new epoch before there is room for it: otherwise each would wait for the other."""
    uuid = cuda_stub.new_uuid()
    environment = cuda_stub.environment([uuid], device_bytes=DEVICE_BYTES)
    flags, path = declaring(tmp_path, kind), tmp_path / "kv.sock"
    with (
        ServiceProcess(path, *flags, environment=environment) as service,
        worker_of(service, environment) as worker,
    ):
        token, epoch = worker.run(ATTACH, blocks=POOL_BYTES // BLOCK_BYTES - 1)
        end(service)
        ended = service.process.poll() is not None
        following = ServiceProcess(path, *flags, environment=environment) if ended else service
        with following:
            waiting = following.wait_for(WAITS)
            assert (waiting["name"], waiting["needed_bytes"] > waiting["available_bytes"]) == ("p", True)
            for request, reason in (
                (resuming(token, epoch), errors_pb2.ERROR_REASON_STALE_EPOCH),
                (hello(), errors_pb2.ERROR_REASON_STARTING),
            ):
                connection, answer = greeted(str(path), request)
                connection.close()
                assert answer.refused.reason == reason
            worker.run("memory.mapped.close()")
            following.wait_for("ready", 1 if ended else 2)
            assert following.stop() == 0


@pytest.mark.parametrize("kind", ["cuda_vmm", "cuda_ipc"])
def test_a_pool_that_does_not_fit_beside_another_program_is_told_at_the_first_start(kind: str, tmp_path: Path) -> None:
    """Nobody of an earlier epoch is there to let go of anything, so there is nothing to wait for."""
    environment = cuda_stub.environment([cuda_stub.new_uuid()], device_bytes=DEVICE_BYTES)
    flags = declaring(tmp_path, kind)
    with ServiceProcess(tmp_path / "other.sock", *flags, environment=environment) as other:
        other.wait_for("ready")
        with ServiceProcess(tmp_path / "kv.sock", *flags, environment=environment) as service:
            assert service.wait() == 2
            assert service.lines[-1].startswith("kvharbor: setting pools.p: needs")
            assert service.files() == []
        assert other.stop() == 0


def test_f6_a_share_of_a_device_is_the_same_beside_memory_of_an_earlier_epoch(tmp_path: Path) -> None:
    """What the old workers have for a moment would otherwise be missing for all of the next life."""
    environment = cuda_stub.environment([cuda_stub.new_uuid()], device_bytes=DEVICE_BYTES)
    flags = ["--arena=cuda_vmm", "--memory=75%"]
    path = tmp_path / "kv.sock"
    with ServiceProcess(path, *flags, environment=environment) as service:
        assert service.wait_for("ready")["memory_bytes"] == DEVICE_BYTES * 3 // 4
        with SessionWorker(path, environment=environment) as worker:
            worker.run(ATTACH, blocks=POOL_BYTES // BLOCK_BYTES - 1)
            service.kill()
            with ServiceProcess(path, *flags, environment=environment) as following:
                assert following.wait_for("ready")["memory_bytes"] == DEVICE_BYTES * 3 // 4
                assert following.stop() == 0
