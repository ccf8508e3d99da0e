"""Pools that the configuration declares: there before the first worker, and there again after a restart."""

from collections.abc import Callable
from pathlib import Path

import pytest

import cuda_stub
from conftest import StartService
from kvharbor.v1 import pool_service_pb2 as pools
from raw_caller import BLOCK_BYTES, RawCaller, refused, small_layout
from service_process import ServiceProcess
from session_worker import SessionWorker

pytestmark = pytest.mark.slow
Declare = Callable[..., str]


@pytest.fixture
def declare(tmp_path: Path) -> Declare:
    """Writes a settings file that declares the pool "p" with the small layout; returns its path."""

    def write(*, size_bytes: int = 9 * BLOCK_BYTES, model: str = "m", tenant: str = "blue") -> str:
        file = tmp_path / "kvharbor.toml"
        file.write_text(
            f"""
            [tenants]
            0 = "blue"
            [pools.p]
            size = "{size_bytes}B"
            tenant = "{tenant}"
            [pools.p.layout]
            model = "{model}"
            block_tokens = 16
            planes = [{{name = "k", layer_count = 1, data_type = "float32", head_count = 1, head_dim = 16}}]
            """
        )
        return str(file)

    return write


OPEN_ON_DEVICE = """
from device_memory import attached
from kvharbor.v1 import pool_service_pb2 as pools

opened = caller.call(caller.pools.OpenPool, pools.OpenPoolRequest(name="p", layout=raw.small_layout()))
memory = attached(caller.side, opened.pool.pool_id)
sequence = caller.allocate(opened.pool.pool_id, *range(20))
block = sequence.table.block_ids[0]
result = [opened.pool.arena_kind, [part.device for part in opened.pool.parts], opened.created]
"""
WRITE = f"""
memory.write(block, bytes([7]) * {BLOCK_BYTES})
caller.commit(opened.pool.pool_id, sequence.sequence_id, 20)
memory.mapped.close()
caller.close()
"""
READ = "result = [sequence.cached_tokens, memory.read(block).hex()]"


def opened(caller: RawCaller, size_bytes: int = 0) -> pools.OpenPoolResponse:
    """Opens the pool "p" with the small layout."""
    request = pools.OpenPoolRequest(name="p", layout=small_layout(), size_bytes=size_bytes)
    response: pools.OpenPoolResponse = caller.call(caller.pools.OpenPool, request)
    return response


def test_a_declared_pool_is_there_for_the_first_worker(start_fresh: StartService, declare: Declare) -> None:
    """Whoever opens it makes nothing, whether it names the size or not."""
    service = start_fresh(config=declare())
    with RawCaller(str(service.socket)) as caller:
        assert [opened(caller).created, opened(caller, size_bytes=9 * BLOCK_BYTES).created] == [False, False]
        assert caller.stats(opened(caller).pool.pool_id).total_block_count == 8


def test_a_worker_with_another_layout_is_refused(start_fresh: StartService, declare: Declare) -> None:
    """As with any pool that exists."""
    service = start_fresh(config=declare(model="other"))
    with RawCaller(str(service.socket)) as caller, refused() as found:
        opened(caller)
    assert found[0].reason == "LAYOUT_MISMATCH"


def test_it_belongs_to_its_tenant(start_fresh: StartService, declare: Declare) -> None:
    """Another tenant's pool of that name is another pool."""
    service = start_fresh(config=declare(tenant="red"))
    with RawCaller(str(service.socket)) as caller:
        assert opened(caller, size_bytes=4 * BLOCK_BYTES).created


def test_after_a_restart_it_is_recovered_not_made_again(start_fresh: StartService, declare: Declare) -> None:
    """What was committed there is a hit."""
    service = start_fresh(config=declare())
    with RawCaller(str(service.socket)) as caller:
        pool_id = opened(caller).pool.pool_id
        sequence = caller.allocate(pool_id, *range(40))
        caller.commit(pool_id, sequence.sequence_id, 40)
    service.restart_child()
    with RawCaller(str(service.socket)) as caller:
        again = opened(caller)
        assert (again.created, again.pool.pool_id) == (False, pool_id)
        assert caller.allocate(pool_id, *range(40)).cached_tokens == 32
    assert len(service.entries("pool made")) == 1


@pytest.mark.parametrize("arena", ["cuda_ipc", "cuda_vmm"])
def test_it_lies_on_a_device_if_the_arena_does_and_is_recovered_there(
    arena: str, start_fresh: StartService, declare: Declare
) -> None:
    """Made before readiness, on the stub of the driver; after a kill -9 a worker finds its own bytes there."""
    device = cuda_stub.new_uuid()
    environment = cuda_stub.environment([device])
    service = start_fresh(config=declare(), arena=arena, cuda_runtime="driver", memory="32MiB", environment=environment)
    there = [arena, [device], False]
    on_stub = {**environment, "KVHARBOR_CUDA_RUNTIME": "driver"}
    with SessionWorker(service.socket, environment=on_stub) as writer:
        assert writer.run(OPEN_ON_DEVICE) == there
        writer.run(WRITE)
    service.restart_child()
    with SessionWorker(service.socket, environment=on_stub) as reader:
        assert reader.run(OPEN_ON_DEVICE) == there
        assert reader.run(READ) == [16, (b"\7" * BLOCK_BYTES).hex()]
    assert [len(service.entries(event)) for event in ("pool made", "pool recovered")] == [1, 1]


def test_one_that_was_declared_otherwise_meanwhile_stays_as_it_is(start_fresh: StartService, declare: Declare) -> None:
    """A changed file costs nobody his cache; the log says what waits for a cold start."""
    service = start_fresh(config=declare())
    declare(size_bytes=5 * BLOCK_BYTES, model="new")
    service.restart_child()
    warning = service.wait_for("declared pool differs from the one that is there, which stays until a cold start")
    assert warning["name"] == "p"
    assert (warning["size_bytes"], warning["declared_size_bytes"]) == (9 * BLOCK_BYTES, 5 * BLOCK_BYTES)
    assert "model" in warning["layout"]
    with RawCaller(str(service.socket)) as caller:
        assert not opened(caller).created


def test_one_that_memory_has_no_room_for_is_told_at_the_start(tmp_path: Path, declare: Declare) -> None:
    """One line, exit status 2, nothing left behind."""
    service = ServiceProcess(tmp_path / "a.sock", "--memory=4KiB", f"--config={declare()}")
    assert service.wait() == 2
    assert (
        service.log
        == "kvharbor: setting pools.p.size (file): 9216B is more than memory (4KiB): set less, or raise memory\n"
    )
    assert service.files() == []
