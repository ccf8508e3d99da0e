"""Pools on devices, on the stub of the driver: both arenas, where they lie, and who may map them."""

import pytest

import cuda_stub
from integration.services_on_stub import KINDS, StartOnDevices, come_back, content, devices_of, info, opening, worker_on
from kvharbor.v1 import cache_service_pb2 as cache
from kvharbor.v1 import errors_pb2
from kvharbor.v1 import pool_service_pb2 as pools
from raw_caller import BLOCK_BYTES, RawCaller, refused


@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_the_device_has_not_is_refused_and_breaks_nothing(
    kind: str, device: str, start_on_stub: StartOnDevices
) -> None:
    """Somebody else has it: the refusal says so, and a later try finds it."""
    service = start_on_stub(kind, [device], memory="60MiB")
    with worker_on(service, [device]) as other, RawCaller(str(service.socket)) as caller:
        other.run(
            "from kvharbor.gpumem import driver, visible_devices\nfrom kvharbor.gpumem.devices import current\n"
            "with current(visible_devices()[0]): taken = driver.mem_alloc(40 * 2**20)"
        )
        with refused() as found:
            caller.call(caller.pools.OpenPool, opening("p", 40 * 2**20))
        assert (found[0].reason, found[0].metadata["limitedBy"]) == ("INSUFFICIENT_MEMORY", f"device {device}")
        assert "earlier epoch" in found[0].message
        assert info(caller).memory_available_bytes == 60 * 2**20
        other.run("with current(visible_devices()[0]): driver.mem_free(taken)")
        assert devices_of(caller, opening("p", 40 * 2**20)) == [device]
    assert not service.entries("service process ended")


def test_pools_lie_on_the_devices_that_are_named_or_where_most_room_is(start_on_stub: StartOnDevices) -> None:
    """Each device has a budget of its own; a pool that is there lies where it lies."""
    first, second = devices = [cuda_stub.new_uuid() for _ in range(2)]
    service = start_on_stub("cuda_vmm", devices)
    with RawCaller(str(service.socket)) as caller:
        assert devices_of(caller, opening("a", 8 * 2**20, devices=[second])) == [second]
        assert devices_of(caller, opening("b", 4 * 2**20)) == [first]
        assert devices_of(caller, opening("c", 2**20, tp_size=3)) == [first, second, first]
        assert [(each.uuid, each.memory_bytes) for each in info(caller).devices] == [
            (uuid, 32 * 2**20) for uuid in devices
        ]
        available = [each.memory_available_bytes for each in info(caller).devices]
        assert available == [(32 - 4 - 2) * 2**20, (32 - 8 - 1) * 2**20]
        assert (info(caller).memory_bytes, info(caller).memory_available_bytes) == (64 * 2**20, sum(available))
        for request, reason in (
            (opening("a", devices=[first]), "POOL_DEVICES_MISMATCH"),
            (opening("d", devices=[first, second]), "INVALID_FIELD"),
            (opening("d", devices=[cuda_stub.new_uuid()]), "INVALID_FIELD"),
            (opening("d", 30 * 2**20, devices=[first]), "INSUFFICIENT_MEMORY"),
        ):
            with refused() as found:
                caller.call(caller.pools.OpenPool, request)
            assert found[0].reason == reason
        assert devices_of(caller, opening("a", devices=[second])) == [second]


def test_a_uuid_is_one_devices_in_any_spelling(device: str, start_on_stub: StartOnDevices) -> None:
    """Other tools write other cases: in a setting and in a request."""
    spelled = device[:4] + device[4:].upper()
    service = start_on_stub("cuda_vmm", [device], devices=spelled)
    with RawCaller(str(service.socket)) as caller:
        assert [each.uuid for each in info(caller).devices] == [device]
        for _ in range(2):
            assert devices_of(caller, opening("p", 2**20, devices=[spelled])) == [device]


@pytest.mark.parametrize("kind", KINDS)
def test_pools_have_the_pieces_that_the_memory_comes_in(kind: str, device: str, start_on_stub: StartOnDevices) -> None:
    """S8: a small pool takes a whole piece of 2 MiB, which no other has; the next process counts it too."""
    service = start_on_stub(kind, [device], faults={"KVSTUB_GRANULARITY": str(2 * 2**20)}, memory="5MiB")
    with RawCaller(str(service.socket)) as caller:
        first = caller.call(caller.pools.OpenPool, opening("a", 2 * BLOCK_BYTES)).pool
        assert info(caller).memory_available_bytes == 3 * 2**20
        service.restart_child()
        come_back(caller, first.pool_id)
        rest = caller.call(caller.pools.OpenPool, opening("rest")).pool
        assert rest.size_bytes == 2 * 2**20
        with refused() as found:
            caller.call(caller.pools.OpenPool, opening("more", 2 * BLOCK_BYTES))
        assert (found[0].reason, found[0].metadata["availableBytes"]) == ("INSUFFICIENT_MEMORY", str(2**20))
        for each in (first, rest):
            caller.call(caller.pools.DropPool, pools.DropPoolRequest(pool_id=each.pool_id))
        assert info(caller).memory_available_bytes == 5 * 2**20


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_map_their_parts_by_uuid_whatever_their_ordinals_are(kind: str, start_on_stub: StartOnDevices) -> None:
    """F5: one sees only the second device, as its first; one sees both the other way round; one sees the wrong one."""
    first, second = devices = [cuda_stub.new_uuid() for _ in range(2)]
    service = start_on_stub(kind, devices)
    reads = "result = attached(caller.side, pool_id, part).read(1).hex()"
    with (
        worker_on(service, devices, visible="1") as only,
        worker_on(service, devices, visible="1,0") as reverse,
        worker_on(service, devices, visible="0") as wrong,
        RawCaller(str(service.socket)) as caller,
    ):
        request = opening("tp", 9 * BLOCK_BYTES, tp_size=2, devices=devices)
        pool_id = caller.call(caller.pools.OpenPool, request).pool.pool_id
        layout = "raw.small_layout(tp_size=2)"
        for worker in (only, reverse, wrong):
            worker.run(f"pool_id = caller.open_pool('tp', block_count=8, layout={layout})")
        for part in (0, 1):
            stamp = "attached(caller.side, pool_id, part).write(1, bytes.fromhex(content))"
            reverse.run(stamp, part=part, content=content(part + 1))
        assert only.run(reads, part=1) == content(2)
        assert [reverse.run(reads, part=part) for part in (0, 1)] == [content(1), content(2)]
        asked = "answer = raw.ask(caller.side, raw.attaching(pool_id, part=1, device_view=view()))[0]"
        told = wrong.run(f"{asked}; result = [answer.refused.reason, dict(answer.refused.metadata)]")
        assert told[0] == errors_pb2.ERROR_REASON_DEVICE_NOT_VISIBLE
        assert (told[1]["device"], told[1]["visibleDevices"]) == (second, first)
        response, fds = caller.attach(pool_id)
        assert (response.refused.metadata["visibleDevices"], fds) == ("none", [])


@pytest.mark.parametrize("allowed", ["false", "true"])
def test_clients_of_mps_are_refused_unless_they_are_allowed(
    allowed: str, device: str, start_on_stub: StartOnDevices
) -> None:
    """Their death would not prove that their kernels have stopped."""
    service = start_on_stub("cuda_vmm", [device], allow_mps=allowed)
    with worker_on(service, [device]) as worker:
        worker.run("pool_id = caller.open_pool('p', block_count=8)")
        asked = "answer, fds = raw.ask(caller.side, raw.attaching(pool_id, device_view=view(mps_client=True)))"
        reason, metadata = worker.run(f"{asked}; result = [answer.refused.reason, dict(answer.refused.metadata)]")
    if allowed == "true":
        assert (reason, metadata) == (0, {})
    else:
        assert (reason, metadata["device"]) == (errors_pb2.ERROR_REASON_MPS_CLIENT_REFUSED, device)
        assert "allow_mps" in metadata["remedy"]


def test_a_fork_without_room_for_its_copy_is_refused(device: str, start_on_stub: StartOnDevices) -> None:
    """The service makes its context with the first copy, and the device may be full by then: that breaks nothing."""
    # Its third one, after those of the start.
    service = start_on_stub("cuda_ipc", [device], faults={"KVSTUB_FAIL": "cuDevicePrimaryCtxRetain:3:2"})
    with RawCaller(str(service.socket)) as caller:
        pool_id = caller.open_pool("p", block_count=2)
        sequence = caller.allocate(pool_id, *range(10))
        caller.commit(pool_id, sequence.sequence_id, 10)
        for _ in range(2):
            asked = cache.ForkRequest(pool_id=pool_id, sequence_id=sequence.sequence_id, child_count=1)
            with refused() as found:
                caller.call(caller.cache.Fork, asked)
            assert found[0].reason == "INSUFFICIENT_MEMORY"
            assert "the service's own context" in found[0].message
        assert caller.stats(pool_id).free_block_count == 1
    assert not service.entries("service process ended")
