"""A client that asks and does not read: it waits for its answers, and gets nothing that is not its own."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import StartService
from kvharbor.v1 import pool_service_pb2 as pools
from kvharbor.v1 import side_pb2
from raw_caller import RawCaller, answer
from side_frames import frame

MOST_REQUESTS = 50_000


def ask_until_blocked(caller: RawCaller, pool_id: str) -> int:
    """Sends Attach after Attach until the service does not take the next; returns how many went."""
    encoded = frame(side_pb2.SideRequest(attach=side_pb2.Attach(pool_id=pool_id)))
    caller.side.settimeout(0.5)
    asked = 0
    with contextlib.suppress(TimeoutError):
        while asked < MOST_REQUESTS:
            caller.side.sendall(encoded)
            asked += 1
    return asked


def received_files(caller: RawCaller) -> Iterator[str]:
    """Reads all answers and yields what each descriptor is."""
    with contextlib.suppress(TimeoutError):
        while True:
            _, fds = answer(caller.side)
            for fd in fds:
                yield str(Path(f"/proc/self/fd/{fd}").readlink())
                os.close(fd)


@pytest.mark.slow
def test_an_attach_that_waits_sends_the_memory_that_was_asked_for(start_fresh: StartService) -> None:
    """The pool is dropped meanwhile, and the number of its descriptor is soon another file's, maybe a tenant's."""
    service = start_fresh()
    with RawCaller(str(service.socket)) as caller, RawCaller(str(service.socket)) as other:
        pool_id = caller.open_pool("mine")
        assert ask_until_blocked(caller, pool_id) < MOST_REQUESTS
        caller.call(caller.pools.DropPool, pools.DropPoolRequest(pool_id=pool_id))
        other.open_pool("theirs")
        assert set(received_files(caller)) == {"/memfd:kvharbor-mine (deleted)"}
