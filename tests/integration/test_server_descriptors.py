"""File descriptors: what a worker gets; and where the service has none left, the refusal says so, and that is all."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path

import grpc
import pytest

from kvharbor.v1 import errors_pb2, side_pb2
from kvharbor.v1 import pool_service_pb2 as pools
from raw_caller import RawCaller, ask, hello, refused, side_connection, small_layout
from service_process import ServiceProcess

pytestmark = pytest.mark.slow


@contextmanager
def room_for(pid: int, free: int) -> Iterator[int]:
    """Leaves a process so many descriptors meanwhile; yields its limit."""
    taken = {int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()}
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    limit = next(islice((number for number in count() if number not in taken), free, None))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, hard))
    yield limit
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


def test_a_pool_for_which_there_is_no_descriptor_is_refused_and_can_be_opened_later(service: ServiceProcess) -> None:
    """With the limit and the remedy, and the memory is the budget's again."""
    with RawCaller(str(service.socket)) as caller:
        opened = caller.open_pool("before")
        available_bytes = caller.call(caller.pools.GetServerInfo, pools.GetServerInfoRequest()).memory_available_bytes
        opening = pools.OpenPoolRequest(name="p", layout=small_layout(), size_bytes=2**20)
        for free in range(2):  # one for the memory, one for the ledger
            with room_for(service.child_pid, free) as limit, refused() as found:
                caller.call(caller.pools.OpenPool, opening)
            assert (found[0].code, found[0].reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "DESCRIPTORS_EXHAUSTED")
            assert found[0].metadata["limit"] == f"{limit} open files"
            assert "ulimit -Hn" in found[0].metadata["remedy"]
            assert found[0].metadata["remedy"] in found[0].message
        info = caller.call(caller.pools.GetServerInfo, pools.GetServerInfoRequest())
        assert (info.restart_count, info.memory_available_bytes) == (0, available_bytes)
        assert caller.call(caller.pools.OpenPool, opening).created
        assert caller.open_pool("before") == opened


def test_memory_that_cannot_be_handed_out_is_refused_on_the_side_socket(service: ServiceProcess) -> None:
    """The socket goes on: the same request is answered once there is room."""
    with RawCaller(str(service.socket)) as caller:
        pool_id = caller.open_pool("p")
        with room_for(service.child_pid, 0):
            response, _ = caller.attach(pool_id)
        assert response.refused.reason == errors_pb2.ERROR_REASON_DESCRIPTORS_EXHAUSTED
        response, fds = caller.attach(pool_id)
        assert response.attached.pool.pool_id == pool_id
        for fd in fds:
            os.close(fd)


def test_no_worker_gets_the_ledger(service: ServiceProcess) -> None:
    """[L13] What the tree trusts is mapped by the service's process alone; a worker gets arena and status page."""
    with RawCaller(str(service.socket)) as caller:
        _, fds = caller.attach(caller.open_pool("p"))
        names = [str(Path(f"/proc/self/fd/{fd}").readlink()) for fd in fds]
        for fd in fds:
            os.close(fd)
    assert names
    assert not any("-ledger" in name for name in names)
    assert "-ledger" in Path(f"/proc/{service.child_pid}/maps").read_text()


@pytest.mark.parametrize("free", [1, 2])
def test_a_session_for_which_there_is_no_descriptor_is_refused(service: ServiceProcess, free: int) -> None:
    """The connection takes one; the pidfd that proves its process, and the session's copy of it, need more."""
    with RawCaller(str(service.socket)):
        with room_for(service.child_pid, free), side_connection(str(service.socket)) as side:
            response, _ = ask(side, hello())
        assert response.refused.reason == errors_pb2.ERROR_REASON_DESCRIPTORS_EXHAUSTED
        with side_connection(str(service.socket)) as side:
            assert ask(side, hello())[0].WhichOneof("response") == "welcome"
    assert service.entries("service process ended") == []


def test_a_resume_for_which_there_is_no_descriptor_is_refused(service: ServiceProcess) -> None:
    """The session stays, and is resumed later."""
    with RawCaller(str(service.socket)) as caller:
        resume = side_pb2.Resume(token=caller.welcome.session_token, epoch=caller.welcome.epoch)
        with room_for(service.child_pid, 1), side_connection(str(service.socket)) as side:
            response, _ = ask(side, hello(resume=resume))
        assert response.refused.reason == errors_pb2.ERROR_REASON_DESCRIPTORS_EXHAUSTED
        assert caller.resume().welcome.session_id == caller.welcome.session_id
