"""What a device has to have done before a commit or a release leaves on the stream [C14]."""

from collections.abc import Callable
from typing import Any

import pytest

from decoding_here import prefilled
from fake_service import FakeService
from kvharbor.client import CommitChain, DecodeBatch, Pool
from kvharbor.client.ordering import Wait

KINDS = ("commit", "commit_blocks", "release", "release_blocks")


class Device:
    """A StreamOrder that writes down each wait, with what had been sent by then; it can be broken."""

    def __init__(self, service: FakeService, pool: Pool) -> None:
        self.waits: list[tuple[str, int]] = []
        self.broken = False
        self._service = service
        pool.order = self

    def sent_count(self) -> int:
        """Commits and releases that have arrived."""
        return sum(len(self._service.blocks.of_kind(kind)) for kind in KINDS)

    def before_commit(self) -> Wait:
        return lambda: self._wait("write")

    def before_release(self) -> Wait:
        return lambda: self._wait("all")

    def _wait(self, what: str) -> None:
        self.waits.append((what, self.sent_count()))
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.fixture
def block_count() -> int:
    return 1024


@pytest.fixture
def device(service: FakeService, pool: Pool) -> Device:
    """The pool's."""
    return Device(service, pool)


def waits_first(device: Device, pool: Pool, call: Callable[[], Any], *what: str) -> None:
    """The call waits for that, then sends; where the device is broken it sends nothing."""
    pool.blocks.flush()
    before = device.sent_count()
    device.waits.clear()
    device.broken = True
    with pytest.raises(RuntimeError, match="illegal memory access"):
        call()
    pool.blocks.flush()
    assert device.sent_count() == before
    device.broken = False
    device.waits.clear()
    call()
    assert device.waits == [(each, before) for each in what]
    pool.blocks.flush()
    assert device.sent_count() == before + 1


def test_block_calls_wait_first(device: Device, pool: Pool) -> None:
    """The blocks are readable, or another's, from then on."""
    leased = pool.blocks.lease(2, 2).blocks
    commit = CommitChain(blocks=leased[:1], tokens=range(16))
    waits_first(device, pool, lambda: pool.blocks.commit([commit]), "write")
    waits_first(device, pool, lambda: pool.blocks.release(leased), "all")


def test_a_step_waits_where_blocks_are_full(device: Device, pool: Pool, batch: DecodeBatch) -> None:
    """And at no other; one that fails has taken no token."""
    batch.join(prefilled(pool, 10))
    device.waits.clear()
    for number in range(6):
        batch.step([number])
    assert device.waits == []
    waits_first(device, pool, lambda: batch.step([6]), "write")
    assert batch.token_counts.tolist() == [17]


def test_what_leaves_a_batch_waits_first(device: Device, pool: Pool, batch: DecodeBatch) -> None:
    """It stays there where that fails."""
    gone, ended = prefilled(pool, 10), prefilled(pool, 20)
    for sequence in (gone, ended):
        batch.join(sequence)
    batch.step([1, 2])
    waits_first(device, pool, batch.sync, "write")
    batch.step([3, 4])
    waits_first(device, pool, lambda: batch.leave(gone), "write")
    waits_first(device, pool, lambda: batch.release([ended]), "all")
    assert (len(batch), gone.token_count, ended.ended) == (0, 12, True)
    gone.release()


def test_a_row_that_is_refused_stays_as_it_is(service: FakeService, pool: Pool, batch: DecodeBatch) -> None:
    """Its last block is full: it takes none of the credits, and tells nothing more."""
    sequence = prefilled(pool, 10, group="ends")
    batch.join(sequence)
    for number in range(6):
        batch.step([number])
    pool.release(group="ends")
    told = len(service.blocks.of_kind("commit"))
    for _ in range(2):
        step = batch.step([7])
        assert (len(step.rows), list(step.refused)) == (0, [0])
    pool.blocks.flush()
    assert (batch.block_counts.tolist(), len(service.blocks.of_kind("commit"))) == ([1], told)
    batch.leave(sequence)
