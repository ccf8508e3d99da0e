"""The service's own stall: time in which its process did not run is nobody's deadline [S21]."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import pytest
from google.protobuf import duration_pb2

from conftest import StartService
from kvharbor.v1 import cache_service_pb2 as cache
from raw_caller import BLOCK_TOKENS, RawCaller, tokens
from service_process import ServiceProcess
from waiting import until

pytestmark = pytest.mark.slow
WAIT_S = 3
STOPPED_S = 4.0
STALL = "the process did not run, deadlines are put off"


@contextlib.contextmanager
def stopped(service: ServiceProcess) -> Iterator[None]:
    """The child does not run for STOPPED_S, as if it were starved; ends when the service has noticed."""
    os.kill(service.child_pid, signal.SIGSTOP)
    stopped_at = time.monotonic()
    yield
    while time.monotonic() - stopped_at < STOPPED_S:
        os.sched_yield()
    os.kill(service.child_pid, signal.SIGCONT)
    # A busy machine may have had it stalled for less before.
    least_s = STOPPED_S - 0.5
    stalled_s = until(lambda: [entry["stalled_s"] for entry in service.entries(STALL) if entry["stalled_s"] > least_s])
    assert max(stalled_s) < STOPPED_S + 5


def test_an_allocate_that_waits_and_a_handoff_outlive_a_stall(start_fresh: StartService) -> None:
    """Both had less time left than the process was stopped for, and neither has ended by it."""
    service = start_fresh(handoff_ttl_s=str(WAIT_S))
    with RawCaller(str(service.socket)) as caller:
        pool_id = caller.open_pool("p", block_count=2)
        handed, held = (
            caller.call(caller.cache.Allocate, cache.AllocateRequest(pool_id=pool_id, token_ids=tokens(*ids))).sequence
            for ids in (range(BLOCK_TOKENS), range(100, 100 + BLOCK_TOKENS))
        )
        commit = cache.CommitItem(sequence_id=handed.sequence_id, computed_tokens=BLOCK_TOKENS)
        handoff = caller.call(caller.cache.Handoff, cache.HandoffRequest(pool_id=pool_id, commit=commit))
        waiting = caller.cache.Allocate.future(
            cache.AllocateRequest(
                pool_id=pool_id, token_ids=tokens(*range(200, 232)), wait=duration_pb2.Duration(seconds=WAIT_S)
            ),
            metadata=caller.metadata,
        )
        stats = cache.StatsRequest(pool_id=pool_id)
        until(lambda: caller.stats(pool_id).waiting_count)
        with stopped(service):
            pass
        assert caller.call(caller.cache.Stats, stats).pools[0].waiting_count == 1
        adopt = cache.AdoptRequest(pool_id=pool_id, handoff_token=handoff.handoff_token)
        adopted = caller.call(caller.cache.Adopt, adopt).sequence
        items = [cache.ReleaseItem(sequence_id=each.sequence_id) for each in (adopted, held)]
        caller.call(caller.cache.Release, cache.ReleaseRequest(pool_id=pool_id, items=items))
        assert len(waiting.result().sequence.table.block_ids) == 4 * 2
