"""What is answered later on a stream: once, and so many at the most."""

import asyncio
from typing import Any

import pytest

from kvharbor.pool.errors import InvalidField, PoolExhausted
from kvharbor.server.scheduling.applications import Patience
from kvharbor.server.stream.waits import MAX_WAITS, Waits
from scenarios import run, settled


def test_a_wait_is_delivered_once() -> None:
    """By its own end or by a cancel, whichever is first; and given up if the stream ends."""

    async def scenario() -> None:
        failures: list[BaseException] = []
        waits, delivered = Waits(failures.append), list[object]()

        async def granted(moment: asyncio.Event) -> str:
            await moment.wait()
            return "granted"

        async def overdue(moment: asyncio.Event) -> str:
            await moment.wait()
            raise PoolExhausted(**dict.fromkeys(_NUMBERS, 1))

        def deliver(task: "asyncio.Task[Any]") -> None:
            delivered.append(task.result() if task.exception() is None else "refused")

        moment = asyncio.Event()
        waits.add(1, granted(moment), Patience(), deliver)
        moment.set()
        await settled()
        assert (delivered, len(waits)) == (["granted"], 0)
        assert not await waits.end(1)

        moment = asyncio.Event()
        patience = Patience()
        patience.begin(moment.set)
        waits.add(2, overdue(moment), patience, deliver)
        assert await waits.end(2)
        await settled()
        assert delivered == ["granted", "refused"]

        forever = asyncio.Event()
        task = waits.add(3, granted(forever), Patience(), deliver)
        await waits.cancel()
        assert (task.cancelled(), len(delivered), len(waits), failures) == (True, 2, 0, [])

    run(scenario)


def test_so_many_may_wait_on_one_stream() -> None:
    """A task each: there is a bound."""

    async def scenario() -> None:
        waits = Waits(lambda _: None)
        for number in range(MAX_WAITS):
            waits.check_room()
            waits.add(number, asyncio.sleep(60), Patience(), lambda _: None)
        with pytest.raises(InvalidField, match="1025th"):
            waits.check_room()
        await waits.cancel()

    run(scenario)


_NUMBERS = (
    "needed_block_count",
    "available_block_count",
    "usable_block_count",
    "free_block_count",
    "cached_block_count",
    "reserved_block_count",
    "active_block_count",
    "warm_block_count",
    "quarantined_block_count",
)
