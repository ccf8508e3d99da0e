"""The forms of `aio.connect`, and what becomes of sequences that are forgotten."""

import asyncio
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from integration.client_kinds import KINDS, connector
from integration.client_worker import LAYOUT, pool_size
from kvharbor.client import HarborClosed, SequenceEnded, aio
from service_process import ServiceProcess


@pytest.fixture(params=KINDS)
def pool(request: pytest.FixtureRequest, shared_service: ServiceProcess) -> Iterator[Any]:
    """A pool of the client under test; its sequences end with the harbor."""
    with connector(request.param) as start:
        yield start(shared_service.target).open_pool("forgotten", LAYOUT, pool_size(8))


def unreleased_warnings(forget: Callable[[], None]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        forget()
        gc.collect()
    return [str(each.message) for each in caught if each.category is ResourceWarning]


def test_connect_is_entered_or_awaited(shared_service: ServiceProcess) -> None:
    """Entered it closes at the end; awaited, as a task too, it gives a harbor to close later."""

    async def body() -> None:
        async with aio.connect(shared_service.target) as entered:
            assert (await entered.server_info()).epoch == entered.epoch
        with pytest.raises(HarborClosed):
            await entered.server_info()
        async with await aio.connect(shared_service.target) as awaited:
            assert awaited.session_id
        harbors = await asyncio.gather(
            aio.connect(shared_service.target), asyncio.create_task(aio.connect(shared_service.target))
        )
        assert len({harbor.session_id for harbor in harbors}) == 2
        for harbor in harbors:
            await harbor.close()

    asyncio.run(body())


def test_a_forgotten_sequence_is_warned_of_once(pool: Any) -> None:
    """Its blocks are held all the same, so the program has to be told."""

    def forget() -> None:
        pool.allocate(range(16), group="forgotten")

    (message,) = unreleased_warnings(forget)
    assert "was not released" in message
    assert pool.stats().sequence_count == 1
    assert pool.release(group="forgotten") == 1


def test_a_sequence_that_has_ended_is_forgotten_quietly(pool: Any) -> None:
    """Released, handed off, released by a name, or ended with its session."""

    def forget() -> None:
        with pool.allocate(range(16)):
            pass
        pool.adopt(pool.allocate(range(16)).handoff(16)).release()
        grouped, other = pool.allocate(range(16), group="g"), pool.allocate(range(16), request_id="r")
        assert (pool.release(group="g"), pool.release(request_id="r")) == (1, 1)
        for ended in (grouped, other):
            with pytest.raises(SequenceEnded):
                ended.slots(0, 16)

    assert unreleased_warnings(forget) == []
