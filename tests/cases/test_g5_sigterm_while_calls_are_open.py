"""G5: SIGTERM while streams and calls are open, twice, and during start-up."""

import os
import signal
import time
import urllib.request
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import start_hooks
from conftest import StartService
from kvharbor.v1 import cache_service_pb2 as cache
from raw_caller import RawCaller, refused
from service_process import ServiceProcess
from waiting import quickest

pytestmark = pytest.mark.slow
GRACE_S = 5.0
MOST_START_UP_S = 1.0

DECLARED = """
[pools.large]
size = "1GiB"
[pools.large.layout]
model = "m"
block_tokens = 16
[[pools.large.layout.planes]]
name = "k"
layer_count = 1
data_type = "float32"
head_count = 16
head_dim = 64
"""


# The memory of the declared pool is begun, and not there before the test ends.
NEVER_RESERVED = """
import os, threading

reserve = os.posix_fallocate

def reserve_one_piece(fd, offset, length):
    reserve(fd, offset, length)
    threading.Event().wait()

os.posix_fallocate = reserve_one_piece
"""


def call_count(service: ServiceProcess) -> float:
    """Returns how many unary calls are under way."""
    page = urllib.request.urlopen(f"http://{service.wait_for('ready')['metrics_listen']}/metrics").read().decode()
    (value,) = (line.split()[1] for line in page.splitlines() if line.startswith("kvharbor_calls_in_flight "))
    return float(value)


def test_calls_finish_streams_end_and_everything_is_gone(start_fresh: StartService) -> None:
    """Health first; a call under way completes, a new one is refused, and a watcher that sleeps holds nothing up."""
    service = start_fresh(memory="256MiB", grace_s=str(GRACE_S), metrics_listen="127.0.0.1:0")
    with RawCaller(str(service.socket)) as caller:
        health = health_pb2_grpc.HealthStub(caller.channel).Watch(health_pb2.HealthCheckRequest())
        assert next(health).status == health_pb2.HealthCheckResponse.SERVING
        pool_id = caller.open_pool("p", block_count=1 << 16)
        watching = cache.WatchRequest(pool_id=pool_id)
        reader, sleeper = (caller.cache.Watch(watching, metadata=caller.metadata) for _ in range(2))
        next(reader)
        request = cache.AllocateRequest(pool_id=pool_id, token_ids=os.urandom(4 << 20), max_cached_tokens=0)
        under_way = caller.cache.Allocate.future(request, metadata=caller.metadata)
        while not under_way.done() and not call_count(service):
            pass
        asked_at = time.monotonic()
        service.process.send_signal(signal.SIGTERM)
        assert next(health).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with refused() as found:
            caller.call(caller.cache.Stats, cache.StatsRequest(pool_id=pool_id))
        assert found[0].code == grpc.StatusCode.UNAVAILABLE
        assert len(under_way.result().sequence.table.block_ids) == 4 * (1 << 16)
        for stream in (reader, sleeper):
            with refused() as found:
                list(stream)
            assert (found[0].code, found[0].reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert service.wait() == 0
        assert time.monotonic() - asked_at < GRACE_S + 1
    assert service.files() == []


def test_the_second_signal_ends_it_at_once(start_fresh: StartService) -> None:
    """Whatever the grace, and although the child does nothing any more."""

    def ended_s() -> float:
        service = start_fresh(grace_s="60")
        os.kill(service.child_pid, signal.SIGSTOP)
        service.process.send_signal(signal.SIGTERM)
        asked_at = time.monotonic()
        while service.process.poll() is None and time.monotonic() - asked_at < 0.3:
            pass
        service.process.send_signal(signal.SIGTERM)
        assert service.wait() == 0
        took_s = time.monotonic() - asked_at
        assert service.files() == []
        return took_s

    assert quickest(ended_s, 2) < 2


def test_a_child_that_does_not_end_in_the_grace_is_ended(start_fresh: StartService) -> None:
    """The orchestrator's own patience is never needed."""

    def ended_s() -> float:
        service = start_fresh(grace_s="1")
        os.kill(service.child_pid, signal.SIGSTOP)
        asked_at = time.monotonic()
        service.process.send_signal(signal.SIGTERM)
        assert service.wait() == 0
        took_s = time.monotonic() - asked_at
        assert service.files() == []
        return took_s

    assert 1 <= quickest(ended_s, 3) < 3


@pytest.mark.parametrize("sign", ["a.sock.lock", "a.side", "settings"])
def test_during_start_up_it_goes_at_once(tmp_path: Path, sign: str) -> None:
    """Before its child is there, while that imports, and while memory is reserved: nothing is left behind."""
    config, place = tmp_path / "kvharbor.toml", tmp_path / "place"
    config.write_text(DECLARED)
    place.mkdir()
    hook = start_hooks.environment(tmp_path / "hook", NEVER_RESERVED)
    flags = (f"--config={config}", "--memory=1.5GiB")

    def ended_s() -> float:
        with ServiceProcess(place / "a.sock", *flags, environment=hook) as service:
            if sign == "settings":
                service.wait_for(sign)
            else:
                while not (place / sign).exists():
                    assert service.process.poll() is None
            service.process.send_signal(signal.SIGTERM)
            asked_at = time.monotonic()
            assert service.wait() == 0
            took_s = time.monotonic() - asked_at
            assert service.entries("ready") == []
            assert list(place.iterdir()) == []
            return took_s

    assert quickest(ended_s, MOST_START_UP_S) < MOST_START_UP_S
