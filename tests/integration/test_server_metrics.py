"""Metrics of a running service."""

import socket
from pathlib import Path

import pytest

from conftest import StartService
from kvharbor.v1 import cache_service_pb2 as cache
from ports import free_port
from raw_caller import BLOCK_BYTES, RawCaller, refused
from scraping import Page, get, scrape
from service_process import ServiceProcess

pytestmark = pytest.mark.slow


def test_what_happens_in_a_pool_is_counted(start_fresh: StartService) -> None:
    """Hits, reused tokens, refusals, sessions and durations add up to what was done."""
    service = start_fresh(metrics_listen="127.0.0.1:0")
    address = service.wait_for("ready")["metrics_listen"]
    labels = {"tenant": "uid-0", "pool": "p"}
    with RawCaller(str(service.socket)) as caller:
        labels["tenant"] = caller.welcome.tenant
        pool_id = caller.open_pool("p", block_count=4)
        for _ in range(2):
            sequence = caller.allocate(pool_id, *range(40))
            caller.commit(pool_id, sequence.sequence_id, 40)
        with refused():
            caller.allocate(pool_id, *range(1000, 1048))
        seen = scrape(address)
        assert seen.value("kvharbor_sessions", state="live") == 1
    assert seen.classes(**labels) == {
        "free": 0,
        "reserved": 2,
        "active": 2,
        "cached": 0,
        "warm": 0,
        "quarantined": 0,
    }
    expected = {
        "allocates_total": 2,
        "hits_total": 1,
        "prompt_tokens_total": 80,
        "reused_tokens_total": 32,
        "committed_blocks_total": 2,
        "refusals_total": 1,
        "used_bytes": 4 * BLOCK_BYTES,
        "shared_blocks": 2,
        "usage_ratio": 1,
        "sequences": 2,
        "sessions": 1,
    }
    assert {name: seen.value(f"kvharbor_pool_{name}", **labels) for name in expected} == expected
    assert seen.value("kvharbor_tenant_reused_tokens_total", tenant=labels["tenant"]) == 32
    calls = "kvharbor_rpc_duration_seconds_count"
    assert seen.value(calls, method="Allocate", code="OK") == 2
    assert seen.value(calls, method="Allocate", code="RESOURCE_EXHAUSTED") == 1
    assert scrape(address).value("kvharbor_sessions", state="live") == 0


def test_a_restarted_process_binds_the_port_anew_and_counts_restarts(start_fresh: StartService) -> None:
    """Prometheus finds it where it was; counters of pools begin at zero, those of the epoch go on."""
    address = f"127.0.0.1:{free_port()}"
    service = start_fresh(metrics_listen=address)
    with RawCaller(str(service.socket)) as caller:
        pool_id = caller.open_pool("p", block_count=4)
        caller.allocate(pool_id, 1, 2, 3)
        tenant = caller.welcome.tenant
        before = scrape(address)
        service.restart_child()
        after = scrape(address)
        assert sum(after.values("kvharbor_restarts_total").values()) == 1
        assert after.values("kvharbor_epoch_info") == before.values("kvharbor_epoch_info")
        allocates = [seen.value("kvharbor_pool_allocates_total", tenant=tenant, pool="p") for seen in (before, after)]
        assert allocates == [1, 0]
        assert after.value("kvharbor_sessions", state="resuming") == 1
        assert sum(after.classes(tenant=tenant, pool="p").values()) == 4


def test_probes_by_http_agree_with_grpc_health(start_fresh: StartService) -> None:
    """For orchestrators that speak no gRPC."""
    service = start_fresh(metrics_listen="127.0.0.1:0")
    address = service.wait_for("ready")["metrics_listen"]
    assert [get(address, path) for path in ("/healthz", "/readyz")] == [Page(200, "alive\n"), Page(200, "ready\n")]


def test_a_port_that_is_taken_is_told_at_the_start(tmp_path: Path) -> None:
    """Like that of gRPC."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        service = ServiceProcess(tmp_path / "a.sock", "--memory=1MiB", f"--metrics-listen={address}")
        assert service.wait() == 2
    assert f"cannot listen at {address}: Address already in use" in service.log
    assert service.files() == []


def test_watches_are_counted_while_they_are_open(start_fresh: StartService) -> None:
    """And not among the calls, whose durations would say nothing."""
    service = start_fresh(metrics_listen="127.0.0.1:0")
    address = service.wait_for("ready")["metrics_listen"]
    with RawCaller(str(service.socket)) as caller:
        pool_id = caller.open_pool("p")
        watch = caller.cache.Watch(cache.WatchRequest(pool_id=pool_id), metadata=caller.metadata)
        next(watch)
        assert scrape(address).value("kvharbor_open_streams") == 1
        watch.cancel()
