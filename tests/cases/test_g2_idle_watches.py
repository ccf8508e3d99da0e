"""G2: watches that nobody reads from hold up nobody, and dead watchers are noticed without traffic."""

import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from conftest import StartService
from kvharbor.v1 import cache_service_pb2 as cache
from raw_caller import RawCaller
from scraping import scrape
from service_process import ServiceProcess

pytestmark = pytest.mark.alone

PROCESS_COUNT = 3
STREAMS_A_PROCESS = 36
"""In all more than any usual number of handler threads."""
MOST_ANSWER_S = 0.2
DEADLINE_S = 1.0
MOST_NOTICE_S = 15.0


@contextlib.contextmanager
def watching(service: ServiceProcess, caller: RawCaller, pool_id: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes with open, idle watches; they are killed at the end."""
    token = caller.welcome.session_token
    script = str(Path(__file__).parent / "watchers.py")
    command = [sys.executable, script, str(service.socket), token, pool_id, str(STREAMS_A_PROCESS)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(PROCESS_COUNT)]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "open\n"
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def median_s(call: Callable[[], object]) -> float:
    """Returns the median duration of twenty calls."""
    taken = []
    for _ in range(20):
        began_at = time.monotonic()
        call()
        taken.append(time.monotonic() - began_at)
    return statistics.median(taken)


@pytest.mark.slow
def test_control_calls_do_not_compete_with_watches(start_fresh: StartService) -> None:
    """G2: Stats and health answer within 200 ms beside 108 idle watches; once their processes are killed, the service
    notices within 15 s without any traffic in the pool, and as many can be opened again."""
    # No progress messages meanwhile: a failing write is not what tells of the death.
    service = start_fresh(metrics_listen="127.0.0.1:0", watch_progress_s="3600")
    address = service.wait_for("ready")["metrics_listen"]
    stream_count = PROCESS_COUNT * STREAMS_A_PROCESS
    with RawCaller(str(service.socket)) as caller, grpc.insecure_channel(service.target) as channel:
        pool_id = caller.open_pool("p")
        stats, metadata = cache.StatsRequest(pool_id=pool_id), caller.metadata
        check = health_pb2_grpc.HealthStub(channel).Check
        calls = (
            lambda: caller.cache.Stats(stats, metadata=metadata, timeout=DEADLINE_S),
            lambda: check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S),
        )
        for _ in range(2):
            with watching(service, caller, pool_id) as processes:
                assert scrape(address).value("kvharbor_open_streams") == stream_count
                assert [median_s(call) < MOST_ANSWER_S for call in calls] == [True, True]
                for process in processes:
                    process.kill()
                give_up_at = time.monotonic() + MOST_NOTICE_S
                while scrape(address).value("kvharbor_open_streams") and time.monotonic() < give_up_at:
                    time.sleep(0.05)
                assert scrape(address).value("kvharbor_open_streams") == 0
