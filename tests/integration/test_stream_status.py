"""The status page and recalls: what schedulers see without a call, and how leased blocks come back [S34], [S36]."""

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Iterator

import pytest
from google.protobuf import duration_pb2

from integration.stream_pools import BLOCK_COUNT, Parties
from integration.stream_pools import parties as parties
from kvharbor.v1 import errors_pb2, side_pb2
from raw_caller import RawCaller, ask
from raw_stream import RawStream, count, first, leasing, releasing
from service_process import ServiceProcess
from waiting import quickest, seconds, until

pytestmark = pytest.mark.alone

LONG = duration_pb2.Duration(seconds=20)


@contextlib.contextmanager
def page_of(caller: RawCaller, pool_id: str) -> Iterator["Page"]:
    """Maps the status page of a pool."""
    request = side_pb2.SideRequest(attach_status=side_pb2.AttachStatus(pool_id=pool_id))
    response, fds = ask(caller.side, request)
    assert response.status_attached.pool_id == pool_id
    (fd,) = fds
    try:
        with mmap.mmap(fd, 4096, prot=mmap.PROT_READ) as region:
            yield Page(region, fd)
    finally:
        os.close(fd)


class Page:
    """The words."""

    def __init__(self, region: mmap.mmap, fd: int) -> None:
        self._region = region
        self.fd = fd

    def word(self, index: int) -> int:
        """Returns one of them."""
        return int(struct.unpack_from("=Q", self._region, 8 * index)[0])

    @property
    def available(self) -> int:
        return self.word(3)

    @property
    def recalls(self) -> int:
        return self.word(4)

    @property
    def waiting(self) -> int:
        return self.word(5)


def test_the_page_shows_how_the_pool_stands(parties: Parties) -> None:
    """Whoever has an answer finds it there."""
    one = parties.join()
    with page_of(one.caller, one.pool_id) as page:
        assert (page.word(0), page.word(1)) == (1, int(one.caller.welcome.epoch, 16))
        assert (page.available, page.recalls, page.waiting) == (BLOCK_COUNT, 0, 0)
        before = page.word(2)
        room = one.stream.lease(one.pool_id, 5).leased
        assert page.available == BLOCK_COUNT - 5
        assert page.word(2) == one.caller.stats(one.pool_id).revision > before
        one.stream.ask(release_blocks=releasing(one.pool_id, room))
        assert page.available == BLOCK_COUNT


def test_a_client_can_only_read_it(parties: Parties) -> None:
    """Not write, map for writing, resize or seal it."""
    one = parties.join()
    with page_of(one.caller, one.pool_id) as page:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(page.fd, b"x", 0)
        with pytest.raises(PermissionError):
            mmap.mmap(page.fd, 4096)
        with pytest.raises(OSError) as refused:  # noqa: PT011 - its number tells
            os.ftruncate(page.fd, 0)
        assert refused.value.errno in (errno.EINVAL, errno.EBADF)
        with pytest.raises(PermissionError):
            fcntl.fcntl(page.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        seals = fcntl.fcntl(page.fd, fcntl.F_GET_SEALS)
        assert seals & fcntl.F_SEAL_SHRINK
        assert seals & fcntl.F_SEAL_GROW


def test_a_page_that_somebody_has_scribbled_on_harms_nobody_else(service: ServiceProcess) -> None:
    """Whoever may do as he likes can open a descriptor anew, for writing too: the service reads nothing there."""
    with RawCaller(str(service.socket)) as caller, RawCaller(str(service.socket)) as other:
        pool_id = caller.open_pool("p", block_count=BLOCK_COUNT)
        other.open_pool("p", block_count=BLOCK_COUNT)
        with RawStream(caller) as stream, RawStream(other) as asking, page_of(caller, pool_id) as page:
            stream.lease(pool_id, BLOCK_COUNT)
            try:
                fd = os.open(f"/proc/self/fd/{page.fd}", os.O_RDWR)
            except PermissionError:
                return
            os.pwrite(fd, b"\xff" * 4096, 0)
            os.close(fd)
            assert asking.lease(pool_id, 1).reason == errors_pb2.ERROR_REASON_POOL_EXHAUSTED
            assert stream.recall().block_count == 1
            assert (page.word(0), page.word(1)) == (1, int(caller.welcome.epoch, 16))
            assert (page.available, page.recalls, page.waiting) == (0, 1, 0)


def test_only_who_has_the_pool_open_gets_it(parties: Parties) -> None:
    """As it is with the memory."""
    one = parties.join()
    with RawCaller(one.caller.path) as stranger:
        request = side_pb2.SideRequest(attach_status=side_pb2.AttachStatus(pool_id=one.pool_id))
        response, _ = ask(stranger.side, request)
        assert response.refused.reason == errors_pb2.ERROR_REASON_POOL_NOT_FOUND


def test_who_holds_leased_blocks_is_recalled_when_another_lacks_room(parties: Parties) -> None:
    """At once, with how many would do; what comes back is granted within 100 ms of the request."""
    idle = parties.join()

    def granted_s() -> float:
        one, other = parties.join(), parties.join()
        room = one.stream.lease(one.pool_id, BLOCK_COUNT).leased
        began_at = time.monotonic()
        number = other.stream.send(lease=leasing(other.pool_id, 4, wait=LONG))
        recall = one.stream.recall()
        assert (recall.pool_id, recall.block_count) == (one.pool_id, 4)
        one.stream.send(release_blocks=releasing(one.pool_id, first(room, 4)))
        granted = other.stream.granted(number).result.leased
        took_s = time.monotonic() - began_at
        assert count(granted) == 4
        for party in (one, other):
            party.stream.close()
            party.caller.close()
        until(lambda: idle.caller.stats(idle.pool_id).free_block_count == BLOCK_COUNT)
        return took_s

    with page_of(idle.caller, idle.pool_id) as page:
        assert quickest(granted_s, 0.1) < 0.1
        assert page.recalls >= 1
    assert not idle.stream.unread


def test_a_recall_is_repeated_while_somebody_waits_and_no_longer(parties: Parties) -> None:
    """Every 100 ms at least, until something comes."""
    one, other = parties.join(), parties.join()
    room = one.stream.lease(one.pool_id, BLOCK_COUNT).leased
    with page_of(one.caller, one.pool_id) as page:
        number = other.stream.send(lease=leasing(other.pool_id, 1, wait=LONG))
        one.stream.recall()
        most_s = 0.1 + 0.05  # this machine's share
        assert quickest(lambda: max(seconds(one.stream.recall) for _ in range(3)), most_s) < most_s
        assert page.waiting == 1
        one.stream.ask(release_blocks=releasing(one.pool_id, first(room)))
        other.stream.granted(number)
        recalls = page.recalls
        until(lambda: page.waiting == 0)
        deadline = time.monotonic() + 0.2
        until(lambda: time.monotonic() > deadline)
        assert page.recalls == recalls


def test_who_is_refused_over_and_over_makes_no_storm(parties: Parties) -> None:
    """A scheduler that spins asks some thousand times a second."""
    one, other = parties.join(), parties.join()
    one.stream.lease(one.pool_id, BLOCK_COUNT)
    with page_of(one.caller, one.pool_id) as page:
        began_at, asked_count = time.monotonic(), 0
        while time.monotonic() - began_at < 0.5:
            assert other.stream.lease(other.pool_id, 1).reason == errors_pb2.ERROR_REASON_POOL_EXHAUSTED
            asked_count += 1
        took_s = time.monotonic() - began_at
        assert 1 <= page.recalls <= took_s / 0.05 + 1
        assert asked_count > page.recalls


def test_two_who_lack_room_have_each_other_recalled(parties: Parties) -> None:
    """Though one of them asks so often that it is always the first."""
    one, other = parties.join(), parties.join()
    one.stream.lease(one.pool_id, BLOCK_COUNT // 2)
    other.stream.lease(other.pool_id, BLOCK_COUNT // 2)
    while not any(response.HasField("recall") for response in one.stream.unread):
        for _ in range(10):
            assert one.stream.lease(one.pool_id, 1).reason == errors_pb2.ERROR_REASON_POOL_EXHAUSTED
        assert other.stream.lease(other.pool_id, 2).reason == errors_pb2.ERROR_REASON_POOL_EXHAUSTED
    assert one.stream.recall().block_count == 2
    assert other.stream.recall().block_count == 1


def test_nobody_is_recalled_where_nothing_is_leased(parties: Parties) -> None:
    """Blocks in use by sequences cannot come back by asking, and one's own leases are one's own affair."""
    one, other = parties.join(), parties.join()
    one.caller.allocate(one.pool_id, *range(16 * 8))
    other.stream.lease(other.pool_id, 8)
    with page_of(one.caller, one.pool_id) as page:
        assert other.stream.lease(other.pool_id, 4).reason == errors_pb2.ERROR_REASON_POOL_EXHAUSTED
        assert page.recalls == 0
        assert not other.stream.unread


def test_the_page_outlives_the_process(service: ServiceProcess) -> None:
    """It is the same memory: whoever has mapped it sees how the pool stands with the next one too."""
    with RawCaller(str(service.socket)) as caller:
        pool_id = caller.open_pool("p", block_count=8)
        with page_of(caller, pool_id) as page:
            caller.allocate(pool_id, *range(32))
            assert page.available == 6
            revision = page.word(2)
            service.restart_child()
            caller.resume()
            caller.resume_pool(pool_id)
            until(lambda: page.available, lambda available: available == 8)
            assert page.word(2) > revision
            with page_of(caller, pool_id) as again:
                assert os.fstat(again.fd).st_ino == os.fstat(page.fd).st_ino
