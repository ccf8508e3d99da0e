"""Start and end of the process: readiness, signals, and what is left behind."""

import signal
import time

import grpc
import pytest
from google.protobuf import duration_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from conftest import StartService
from kvharbor.v1 import cache_service_pb2 as cache
from process_tree import open_files
from raw_caller import RawCaller, refused, tokens
from service_process import ServiceProcess
from waiting import until

SERVICES = ("", "kvharbor.v1.CacheService", "kvharbor.v1.PoolService")
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def test_health_and_reflection_name_both_services(harbor: str) -> None:
    """Overall and per service, for probes and for tools like grpcurl."""
    with grpc.insecure_channel(f"unix:{harbor}") as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        assert [check(health_pb2.HealthCheckRequest(service=name)).status for name in SERVICES] == [SERVING] * 3
        ask = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        (answer,) = ask(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        listed = {service.name for service in answer.list_services_response.service}
        assert listed >= set(SERVICES[1:])


def test_a_waiting_call_and_a_new_one_are_told_of_the_end(start_fresh: StartService) -> None:
    """SIGTERM: health first, waits end with DRAINING, and the process goes with status 0."""
    service = start_fresh(grace_s="20")
    with RawCaller(str(service.socket)) as caller:
        health = health_pb2_grpc.HealthStub(caller.channel).Watch(health_pb2.HealthCheckRequest())
        assert next(health).status == SERVING
        pool_id = caller.open_pool("p", block_count=1)
        caller.call(caller.cache.Allocate, cache.AllocateRequest(pool_id=pool_id, token_ids=tokens(1)))
        request = cache.AllocateRequest(pool_id=pool_id, token_ids=tokens(2), wait=duration_pb2.Duration(seconds=60))
        waiting = caller.cache.Allocate.future(request, metadata=caller.metadata)
        until(lambda: caller.stats(pool_id).waiting_count)
        asked_at = time.monotonic()
        service.process.send_signal(signal.SIGTERM)
        assert next(health).status == NOT_SERVING
        with refused() as found:
            waiting.result()
        assert (found[0].code, found[0].reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert service.wait() == 0
        assert time.monotonic() - asked_at < 10
    assert service.files() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_both_signals_of_an_operator_end_it_cleanly(start_fresh: StartService, number: signal.Signals) -> None:
    """Sessions that are open do not hold it up."""
    service = start_fresh()
    with RawCaller(str(service.socket)) as caller:
        caller.open_pool("p")
        service.process.send_signal(number)
        assert service.wait() == 0
    assert service.files() == []


def test_its_memory_goes_with_it(service: ServiceProcess) -> None:
    """Arena, ledger and status page are unnamed files: nothing remains, not even after kill -9."""
    with RawCaller(str(service.socket)) as caller:
        caller.open_pool("p")
        memory = {f"/memfd:kvharbor-p{part} (deleted)" for part in ("", "-ledger", "-status")}
        assert {file for file in open_files(service.child_pid).values() if "memfd" in file} == memory


def test_sockets_get_the_mode_that_is_set(start_fresh: StartService) -> None:
    """0600 unless the operator opens them; the umask plays no part."""
    own, shared = start_fresh(), start_fresh(socket_mode="0666")
    modes = [
        path.stat().st_mode & 0o777
        for service in (own, shared)
        for path in (service.socket, service.socket.with_suffix(".side"))
    ]
    assert modes == [0o600, 0o600, 0o666, 0o666]
