"""Who dies with a part in pools on devices, on the stub of the driver: the process, the keeper, the device itself."""

import itertools
import os
import signal
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from integration.services_on_stub import (
    KINDS,
    OPEN,
    READ,
    WRITE,
    StartOnDevices,
    come_back,
    content,
    devices_of,
    info,
    on_stub,
    opening,
    worker_on,
)
from kvharbor.v1 import errors_pb2
from kvharbor.v1 import pool_service_pb2 as pools
from process_tree import has_ended
from raw_caller import RawCaller, greeted, resuming
from service_process import ServiceProcess
from waiting import quickest, until


def keeper_pid(service: ServiceProcess) -> int:
    """Returns the process that keeps the memory of the service's one device."""
    return int(service.entries("keeper began")[-1]["pid"])


def ready(service: ServiceProcess) -> ServiceProcess:
    """Returns a service when it is ready."""
    service.wait_for("ready")
    return service


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_worker_has_written_survives_the_services_process(
    kind: str, device: str, start_on_stub: StartOnDevices
) -> None:
    """Through forks, whose copies the service makes before its death and after, byte for byte."""
    service = start_on_stub(kind, [device])
    with worker_on(service, [device]) as worker:
        worker.run(OPEN)
        full, tail = worker.run("one = caller.allocate(pool_id, *range(20)); result = blocks(one)")
        for block in (full, tail):
            worker.run(WRITE, block=block, content=content(block + 1))
        worker.run("caller.commit(pool_id, one.sequence_id, 20)")
        copies = [worker.run("child = fork(one); result = blocks(child)")[1]]
        service.restart_child()
        worker.run(
            "caller.resume()\n"
            "cursors = dict(committed_tokens=16, tail=raw.tokens(*range(16, 20)), computed_tokens=20)\n"
            "held = [raw.held_sequence(each, **cursors) for each in (one, child)]\n"
            "one = caller.resume_pool(pool_id, *held).results[0].sequence\n"
        )
        copies.append(worker.run("result = blocks(fork(one))")[1])
        assert len({tail, *copies}) == 3
        assert worker.run(READ, block=full) == content(full + 1)
        for block in (tail, *copies):
            assert worker.run(READ, block=block) == content(tail + 1)
        worker.run("memory.mapped.close()")


def test_a_keeper_outlives_the_services_process_and_frees_what_is_dropped(
    device: str, start_on_stub: StartOnDevices
) -> None:
    """Most of the device can be had again after each drop, by this process and those after it, killed or upgraded."""
    service = start_on_stub("cuda_ipc", [device], memory="60MiB")
    most_bytes = 40 * 2**20
    with RawCaller(str(service.socket)) as caller:
        for name in ("a", "b"):
            pool_id = caller.call(caller.pools.OpenPool, opening(name, most_bytes)).pool.pool_id
            assert info(caller).memory_available_bytes < most_bytes
            caller.call(caller.pools.DropPool, pools.DropPoolRequest(pool_id=pool_id))
        kept = caller.call(caller.pools.OpenPool, opening("kept", most_bytes)).pool
        service.restart_child()
        come_back(caller, kept.pool_id)
        service.process.send_signal(signal.SIGHUP)
        service.wait_for("ready", 3)
        come_back(caller, kept.pool_id)
        caller.call(caller.pools.DropPool, pools.DropPoolRequest(pool_id=kept.pool_id))
        assert devices_of(caller, opening("c", most_bytes)) == [device]
    assert len(service.entries("keeper began")) == 1
    assert not has_ended(keeper_pid(service))


def test_without_its_keeper_the_memory_is_lost_and_the_epoch_ends(device: str, start_on_stub: StartOnDevices) -> None:
    """The next process begins anew, with a keeper of its own; engines are told that their handles are of the past."""
    service = start_on_stub("cuda_ipc", [device])
    with worker_on(service, [device]) as worker:
        epoch, token = worker.run(OPEN + "; result = [caller.welcome.epoch, caller.welcome.session_token]")
        os.kill(keeper_pid(service), signal.SIGKILL)
        lost = service.wait_for("the memory of pools is lost, the next start is cold")
        assert device in lost["cause"]
        ready = service.wait_for("ready", 2)
        assert (ready["epoch"] == epoch, ready["restart_count"]) == (False, 0)
        side, response = greeted(str(service.socket), resuming(token, epoch))
        side.close()
        assert response.refused.reason == errors_pb2.ERROR_REASON_STALE_EPOCH
        worker.run("memory.mapped.close(); caller.abandon(); caller = raw.RawCaller(path)")
        worker.run(OPEN + "; memory.write(1, bytes.fromhex(content))", content=content(7))
        assert worker.run(READ, block=1) == content(7)


@pytest.mark.parametrize("end", [ServiceProcess.kill, ServiceProcess.stop])
def test_a_keeper_ends_with_its_supervisor(
    end: Callable[[ServiceProcess], object], device: str, start_on_stub: StartOnDevices
) -> None:
    """However that ends: nothing is left that holds memory of the device."""
    service = start_on_stub("cuda_ipc", [device])
    pid = keeper_pid(service)
    end(service)
    until(lambda: has_ended(pid), bool)


def test_blocks_of_a_dead_worker_wait_for_the_devices_grace(device: str, start_on_stub: StartOnDevices) -> None:
    """What it had queued on the device may still run when the process is gone."""
    grace_s = 1.0
    service = start_on_stub("cuda_vmm", [device], device_grace_s=str(grace_s))
    times = itertools.count(1)

    def waited_s() -> float:
        with worker_on(service, [device]) as worker:
            worker.run(OPEN + "; one = caller.allocate(pool_id, *range(20))")
            killed_at = datetime.now(UTC)
            worker.kill()
            nth = next(times)
            service.wait_for("blocks quarantined", nth)
            ended_at = datetime.fromisoformat(service.wait_for("session ended", nth)["timestamp"])
        took_s = (ended_at - killed_at).total_seconds()
        assert took_s >= grace_s
        return took_s

    assert quickest(waited_s, grace_s + 2) < grace_s + 2


def test_a_device_that_fails_ends_the_process_and_the_next_goes_on(device: str, tmp_path: Path) -> None:
    """What the device holds is not known to this process any more; to the workers it is."""
    # Its log has a traceback in the end, which a service of the fixture's must not.
    environment = {**on_stub([device]), "KVSTUB_FAIL": "cuMemcpy2DAsync:1"}
    with (
        ServiceProcess(tmp_path / "kv.sock", "--arena=cuda_vmm", "--memory=32MiB", environment=environment) as service,
        worker_on(ready(service), [device]) as worker,
    ):
        worker.run(OPEN)
        (block,) = worker.run("one = caller.allocate(pool_id, *range(10)); result = blocks(one)")
        worker.run(WRITE, block=block, content=content(9))
        worker.run("caller.commit(pool_id, one.sequence_id, 10)")
        worker.run("import contextlib, grpc\nwith contextlib.suppress(grpc.RpcError): fork(one)")
        ended = service.wait_for("service process ended")
        assert (ended["cause"], ended["status"]) == ("broken", 70)
        service.wait_for("ready", 2)
        worker.run(
            "caller.resume()\n"
            "cursors = dict(tail=raw.tokens(*range(10)), computed_tokens=10)\n"
            "resumed = caller.resume_pool(pool_id, raw.held_sequence(one, **cursors))\n"
            "result = blocks(resumed.results[0].sequence)"
        )
        assert worker.run(READ, block=block) == content(9)
