"""Refills of a stock that bring nothing, or come when nobody needs them any more [C19]."""

import time
from typing import Any

import pytest

from fake_process import refused_item
from fake_service import FakeService
from kvharbor.client import Credits, Pool
from waiting import until

COUNT = 16


def lease_count(service: FakeService) -> int:
    """How often the service was asked."""
    return len(service.blocks.of_kind("lease"))


def test_a_refill_on_its_way_goes_back_when_nothing_runs(service: FakeService, pool: Pool) -> None:
    """`rest` is for an engine that has nothing to do, and others may need the room."""
    stock = Credits(pool, COUNT, idle_s=3600)
    until(lambda: len(stock) == COUNT)
    with pool.link.guard:  # no answer is taken in before
        stock.draw(COUNT - 1)
        stock.keep()
        stock.rest()
    for _ in range(2):  # the release of what has come is sent as that is taken in
        pool.blocks.flush()
    assert (lease_count(service), len(stock)) == (2, 0)
    assert len(service.blocks.own) == COUNT - 1
    stock.close()


@pytest.mark.parametrize("answer", [None, refused_item("POOL_EXHAUSTED", 8)], ids=["nothing", "refused"])
def test_a_refill_that_brings_nothing_is_made_again_after_a_pause(
    service: FakeService, pool: Pool, monkeypatch: pytest.MonkeyPatch, answer: Any
) -> None:
    """An engine that steps while the pool is full must not ask at every step, and is not without credits for ever."""
    lease, free_count = service.blocks._lease, service.blocks.free_count
    began_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began_s)
    service.blocks.free_count = 0
    monkeypatch.setattr(service.blocks, "_lease", lambda request: answer or lease(request))
    stock = Credits(pool, COUNT, idle_s=3600)
    for _ in range(5):
        pool.blocks.flush()
        stock.stock_up()
    assert (lease_count(service), len(stock)) == (1, 0)
    service.blocks.free_count = free_count
    monkeypatch.undo()
    monkeypatch.setattr(time, "monotonic", lambda: began_s + 1)
    stock.stock_up()
    pool.blocks.flush()
    assert (lease_count(service), len(stock)) == (2, COUNT)
    monkeypatch.undo()
    stock.close()
