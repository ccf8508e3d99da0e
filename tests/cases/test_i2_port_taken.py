"""I2: a taken port is an error, never shared."""

import socket
from pathlib import Path

import grpc
import pytest

from conftest import StartService
from kvharbor.v1 import pool_service_pb2 as pools
from kvharbor.v1 import pool_service_pb2_grpc as rpc
from service_process import failed_start

pytestmark = pytest.mark.slow
MOST_START_S = 3.0


def refused_at(tmp_path: Path, address: str) -> str:
    """Starts a service that finds its address taken; returns its one line."""
    return failed_start(tmp_path / "second.sock", "--memory=1MiB", f"--listen={address}", within_s=MOST_START_S)


def test_a_second_service_at_the_same_address_does_not_start(start_fresh: StartService, tmp_path: Path) -> None:
    """I2: it names the address, and 100 of 100 calls reach the first."""
    first = start_fresh(listen="127.0.0.1:0")
    address = first.wait_for("ready")["listen"]
    assert f"cannot listen at {address}: Address already in use" in refused_at(tmp_path, address)
    epochs = set()
    for _ in range(100):
        with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            info = rpc.PoolServiceStub(channel).GetServerInfo(pools.GetServerInfoRequest(), timeout=5)
            epochs.add(info.epoch)
    assert epochs == {first.wait_for("ready")["epoch"]}


def test_a_port_of_another_program_is_not_taken(tmp_path: Path) -> None:
    """I2: whatever listens there goes on."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert f"cannot listen at 127.0.0.1:{port}" in refused_at(tmp_path, f"127.0.0.1:{port}")
        with socket.create_connection(("127.0.0.1", port)):
            other.accept()[0].close()


def test_port_0_is_reported_in_the_log_and_in_a_file(start_fresh: StartService) -> None:
    """I2: both have the real port, and the file goes with the service."""
    service = start_fresh(listen="localhost:0")
    address = service.wait_for("ready")["listen"]
    file = Path(f"{service.socket}.port")
    assert address.endswith(f":{file.read_text().strip()}")
    with grpc.insecure_channel(address) as channel:
        info = rpc.PoolServiceStub(channel).GetServerInfo(pools.GetServerInfoRequest(), timeout=5)
        assert info.epoch == service.wait_for("ready")["epoch"]
    assert service.stop() == 0
    assert not file.exists()


def test_an_address_of_another_host_is_named(tmp_path: Path) -> None:
    """I2: so is one that no name leads to."""
    assert "cannot listen at 192.0.2.1:1" in refused_at(tmp_path, "192.0.2.1:1")
