"""E7 on a device: the driver takes seconds to let go of a dropped pool's memory, and nobody else waits for it.

On the stub of the driver: its call releases the interpreter's lock, as those of the bindings do.
"""

import time
from functools import partial
from pathlib import Path
from statistics import quantiles

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import cuda_stub
from conftest import StartService
from kvharbor.v1 import pool_service_pb2 as pools
from raw_caller import DEADLINE_S, RawCaller
from session_worker import SessionWorker
from waiting import quickest, seconds, until

pytestmark = pytest.mark.slow

UNMAP_S = 60.0
CALLS = 40
PERIOD_S = 0.05
LIMIT_S = 0.2
ANSWERED_S = 1.0

# In a worker: the service makes a copy, and so has the pool's memory open; nothing of the session is left.
COPY = """
pool_id = caller.open_pool("a", block_count=8)
one = caller.allocate(pool_id, *range(10))
caller.commit(pool_id, one.sequence_id, 10)
asked = raw.cache_service_pb2.ForkRequest(pool_id=pool_id, sequence_id=one.sequence_id, child_count=1)
caller.call(caller.cache.Fork, asked)
caller.close()
result = pool_id
"""


def available(caller: RawCaller) -> int:
    """Memory of the device that is not given to a pool."""
    return int(caller.call(caller.pools.GetServerInfo, pools.GetServerInfoRequest()).memory_available_bytes)


@pytest.mark.parametrize(("arena", "unmap"), [("cuda_ipc", "cuIpcCloseMemHandle"), ("cuda_vmm", "cuMemUnmap")])
def test_e7_a_slow_close_of_device_memory_stops_nobody(
    arena: str, unmap: str, tmp_path: Path, start_fresh: StartService
) -> None:
    """E7: allocations in another pool of the device take less than 200 ms, a new client less than 1 s; health stays.

    The pool's memory is accounted for until it is back.
    """
    slow = tmp_path / "slow"  # Not before: memory that is made is unmapped too, when it is zeroed.
    environment = {**cuda_stub.environment([cuda_stub.new_uuid()]), "KVSTUB_SLOW": f"{unmap}:{UNMAP_S}:{slow}"}
    service = start_fresh(environment=environment, arena=arena, cuda_runtime="driver", memory="32MiB")
    path = str(service.socket)

    def share_of_what_is_allowed() -> float:
        with SessionWorker(path) as worker, RawCaller(path) as b:
            other = b.open_pool("b", block_count=CALLS)
            left = available(b)
            pool_id = worker.run(COPY)
            health, taken_s, looked_s = health_pb2_grpc.HealthStub(b.channel), [], []
            booked = available(b)
            assert booked < left
            slow.touch()
            dropping = b.pools.DropPool.future(pools.DropPoolRequest(pool_id=pool_id), metadata=b.metadata)
            until(lambda: "a" not in names(b), bool)

            def look_after_it() -> None:
                answer = health.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING

            def register() -> None:
                with RawCaller(path) as c:
                    assert available(c) == booked

            for number in range(CALLS):
                taken_s.append(seconds(partial(b.allocate, other, number)))
                if number % 20 == 0:
                    looked_s.append(seconds(look_after_it))
                time.sleep(PERIOD_S)
            registered_s = seconds(register)
            assert not dropping.done()
            slow.unlink()
            dropping.result(DEADLINE_S)
            assert available(b) == left
        return max(quantiles(taken_s, n=100)[98] / LIMIT_S, max(registered_s, *looked_s) / ANSWERED_S)

    assert quickest(share_of_what_is_allowed, 1) < 1


def names(caller: RawCaller) -> list[str]:
    """The pools that can be found."""
    return [pool.name for pool in caller.call(caller.pools.ListPools, pools.ListPoolsRequest()).pools]
