"""E6: the wall clock of the service jumps by hours, and every duration stays what it was."""

import datetime
import os
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from google.protobuf import duration_pb2

from conftest import StartService
from kvharbor.v1 import cache_service_pb2 as cache
from raw_caller import RawCaller, refused, tokens
from service_process import ServiceProcess
from waiting import quickest, until

HANDOFF_TTL_S = 3.0
WAIT_S = 2.5
PIN_TTL_S = 4.0
MOST_LATE_S = 1.0
HOUR_S = 3600


class WallClock:
    """The wall clock of a process that is started with `environment`."""

    def __init__(self, folder: Path) -> None:
        library, self._offset = folder / "wall_clock.so", folder / "offset"
        source = Path(__file__).parent / "wall_clock.c"
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-o", library, source], check=True, timeout=60)
        self._offset.write_bytes(struct.pack("q", 0))
        self.environment = {"LD_PRELOAD": str(library), "WALL_CLOCK": str(self._offset)}

    def set_ahead(self, seconds: int) -> None:
        """Moves it: from now on it is so far ahead of the true time."""
        descriptor = os.open(self._offset, os.O_WRONLY)
        os.pwrite(descriptor, struct.pack("q", seconds), 0)
        os.close(descriptor)


def seconds(length_s: float) -> duration_pb2.Duration:
    """Returns a duration as a message."""
    return duration_pb2.Duration(seconds=int(length_s), nanos=int(length_s % 1 * 1e9))


def elapsed_when(began_at: float, over: Callable[[], bool]) -> float:
    """Returns how long it took until `over()`."""
    until(over)
    return time.monotonic() - began_at


def logged_at(service: ServiceProcess, session_id: str) -> float:
    """Returns the time stamp of a session's beginning in the log, in seconds of the wall clock."""
    (entry,) = (each for each in service.entries("session began") if str(each["session"]) == session_id)
    return datetime.datetime.fromisoformat(entry["timestamp"]).timestamp()


@pytest.mark.slow
def test_only_time_stamps_for_people_jump(start_fresh: StartService, tmp_path: Path) -> None:
    """E6: an hour forth and two back: a session lives on, an abandoned hand-off ends after its ttl, a waiting Allocate
    after its wait, a warm pin after its own ttl, each by the monotonic clock."""
    clock = WallClock(tmp_path)

    def latest_s() -> float:
        clock.set_ahead(0)
        service = start_fresh(environment=clock.environment, handoff_ttl_s=str(HANDOFF_TTL_S))
        with RawCaller(str(service.socket)) as caller:
            pool_id = caller.open_pool("p", block_count=8)
            sequence = caller.allocate(pool_id, *range(32))
            caller.commit(pool_id, sequence.sequence_id, 32)
            pin = cache.WarmupRequest(pool_id=pool_id, token_ids=tokens(*range(32)), name="w", ttl=seconds(PIN_TTL_S))
            pinned_at = time.monotonic()
            caller.call(caller.cache.Warmup, pin)
            abandoned = caller.allocate(pool_id, *range(100, 116))
            item = cache.CommitItem(sequence_id=abandoned.sequence_id, computed_tokens=16)
            handed_off_at = time.monotonic()
            caller.call(caller.cache.Handoff, cache.HandoffRequest(pool_id=pool_id, commit=item))
            held = caller.allocate(pool_id, *range(200, 280))

            waited: list[tuple[float, grpc.StatusCode]] = []

            def wait() -> None:
                began_at = time.monotonic()
                with refused() as found:
                    caller.allocate(pool_id, *range(1000, 1096), wait=seconds(WAIT_S))
                waited.append((time.monotonic() - began_at, found[0].code))

            waiter = threading.Thread(target=wait)
            waiter.start()
            elapsed_when(time.monotonic(), lambda: caller.stats(pool_id).waiting_count == 1)

            clock.set_ahead(HOUR_S)
            with RawCaller(str(service.socket)) as ahead:
                ahead.open_pool("p", block_count=8)
            stats = caller.stats(pool_id)
            assert (stats.pin_count, stats.sequence_count, stats.waiting_count) == (1, 3, 1)

            clock.set_ahead(-HOUR_S)
            with RawCaller(str(service.socket)) as behind:
                behind.open_pool("p", block_count=8)
            waiter.join()
            ended_s = [
                elapsed_when(handed_off_at, lambda: caller.stats(pool_id).sequence_count == 2),
                elapsed_when(pinned_at, lambda: caller.stats(pool_id).pin_count == 0),
            ]
            ((waited_s, code),) = waited
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            late_s = [
                took_s - meant_s
                for took_s, meant_s in zip([waited_s, *ended_s], [WAIT_S, HANDOFF_TTL_S, PIN_TTL_S], strict=True)
            ]
            assert min(late_s) >= -0.01
            # The session was there all along, and what it holds is its own.
            assert caller.commit(pool_id, held.sequence_id, 80).status.code == 0
            first, second, third = (logged_at(service, each.welcome.session_id) for each in (caller, ahead, behind))
        assert HOUR_S <= second - first < HOUR_S + 60
        assert -HOUR_S <= third - first < -HOUR_S + 60
        return max(late_s)

    assert quickest(latest_s, MOST_LATE_S) < MOST_LATE_S
