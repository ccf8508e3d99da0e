"""I5: while memory is reserved the service lives and is not ready; starting is not full."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import start_hooks
from kvharbor.v1 import cache_service_pb2 as cache
from kvharbor.v1 import cache_service_pb2_grpc
from ports import free_port
from raw_caller import RawCaller, refused
from scraping import Page, get
from service_process import DEADLINE_S, ServiceProcess
from waiting import quickest, seconds, until

pytestmark = pytest.mark.slow
PIECE_BYTES = 64 * 2**20
POOL_BYTES = 2 * PIECE_BYTES + 2**20
MOST_LIVENESS_S = 1.0

# Each piece waits until the test says "go", as one of many GiB would.
SLOW_RESERVING = """
import os, time

reserve = os.posix_fallocate

def slow_reserve(fd, offset, length):
    with open({pieces!r}, "a") as pieces:
        print(length, file=pieces)
    while not os.path.exists({go!r}):
        time.sleep(0.01)
    return reserve(fd, offset, length)

os.posix_fallocate = slow_reserve
"""
SETTINGS = f"""
[pools.p]
size = "{POOL_BYTES}B"
[pools.p.layout]
model = "m"
block_tokens = 16
planes = [{{name = "k", layer_count = 1, data_type = "float32", head_count = 64, head_dim = 256}}]
"""


class Starting:
    """A service that is held while it reserves memory."""

    def __init__(self, folder: Path) -> None:
        self._go, self._pieces = folder / "go", folder / "pieces"
        (folder / "kvharbor.toml").write_text(SETTINGS)
        hook = SLOW_RESERVING.format(go=str(self._go), pieces=str(self._pieces))
        self.http = f"127.0.0.1:{free_port()}"
        self.service = ServiceProcess(
            folder / "a.sock",
            "--memory=160MiB",
            "--listen=127.0.0.1:0",
            f"--metrics-listen={self.http}",
            f"--config={folder / 'kvharbor.toml'}",
            environment=start_hooks.environment(folder / "hook", hook),
        )

    @property
    def tcp(self) -> str:
        """The TCP address for gRPC."""
        return f"127.0.0.1:{Path(f'{self.service.socket}.port').read_text().strip()}"

    def wait_until_it_reserves(self) -> None:
        """Waits for the first piece."""
        until(lambda: self._pieces.exists() and self.pieces())

    def go_on(self) -> None:
        """Lets it reserve, and waits until it is ready."""
        self._go.touch()
        self.service.wait_for("ready")

    def pieces(self) -> list[int]:
        """Bytes of each piece so far."""
        return [int(line) for line in self._pieces.read_text().split()]

    def health_command(self, *arguments: str) -> tuple[int, str]:
        """Asks as an exec probe does, over the Unix socket."""
        command = [sys.executable, "-m", "kvharbor.server.cli", "health", f"--socket={self.service.socket}", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        return done.returncode, done.stdout.strip()

    def health(self, service_name: str) -> str:
        """Asks gRPC health over TCP."""
        with grpc.insecure_channel(self.tcp, options=[("grpc.enable_http_proxy", 0)]) as channel:
            request = health_pb2.HealthCheckRequest(service=service_name)
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


@pytest.fixture
def starting(tmp_path: Path) -> Iterator[Starting]:
    """A service in the middle of reserving memory."""
    held = Starting(tmp_path)
    try:
        held.wait_until_it_reserves()
        yield held
    finally:
        if held.service.process.poll() is None:
            held.service.stop()
        held.service.wait()


def test_it_is_alive_before_it_is_ready(starting: Starting) -> None:
    """I5: liveness at once by command, TCP and HTTP; readiness by each of them only when the whole pool is usable."""
    assert starting.health_command("--live") == (0, "SERVING")
    assert starting.health_command() == (1, "NOT_SERVING")
    names = ("", "kvharbor.v1.PoolService", "kvharbor.v1.CacheService", "liveness")
    assert [starting.health(name) for name in names] == ["NOT_SERVING"] * 3 + ["SERVING"]
    assert [get(starting.http, path) for path in ("/healthz", "/readyz")] == [
        Page(200, "alive\n"),
        Page(503, "STARTING\n"),
    ]
    assert quickest(lambda: seconds(lambda: starting.health("liveness")), MOST_LIVENESS_S) < MOST_LIVENESS_S
    starting.go_on()
    assert starting.health_command() == (0, "SERVING")
    assert [starting.health(name) for name in names] == ["SERVING"] * 4
    assert get(starting.http, "/readyz") == Page(200, "ready\n")
    # The ledger may be reserved beside the pool.
    assert sum(size for size in starting.pieces()) >= POOL_BYTES - 2**20
    assert max(starting.pieces()) <= PIECE_BYTES


def test_a_call_before_is_told_that_it_starts(starting: Starting) -> None:
    """I5: UNAVAILABLE with a hint, not RESOURCE_EXHAUSTED; a worker that waits for readiness gets through."""
    with grpc.insecure_channel(starting.service.target) as channel, refused() as found:
        cache_service_pb2_grpc.CacheServiceStub(channel).Allocate(cache.AllocateRequest(pool_id="p"), timeout=5)
    assert (found[0].code, found[0].reason) == (grpc.StatusCode.UNAVAILABLE, "STARTING")
    assert found[0].status is not None
    assert any(detail.type_url.endswith("RetryInfo") for detail in found[0].status.details)
    starting.go_on()
    with RawCaller(str(starting.service.socket)):
        pass


def test_a_signal_ends_it_in_the_middle(starting: Starting) -> None:
    """Nobody has to wait for the memory to be able to stop."""
    began_at = time.monotonic()
    assert starting.service.stop() == 0
    assert time.monotonic() - began_at < DEADLINE_S / 4
    assert starting.service.files() == []
    assert len(starting.pieces()) == 1
