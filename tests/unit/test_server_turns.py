"""One ordered queue: turns are handed on, and a cancelled wait leaves no hole."""

import asyncio

import pytest

from kvharbor.server.scheduling.turns import Turns


def test_turns_are_had_in_order_of_asking() -> None:
    """First come first served, also against a newcomer that asks just when the turn is handed on."""

    async def scenario() -> list[str]:
        turns, order = Turns(), []
        assert turns.try_take()

        async def work(name: str) -> None:
            await turns.take()
            order.append(name)
            await asyncio.sleep(0)
            turns.leave()

        waiting = [asyncio.create_task(work(name)) for name in "abc"]
        await asyncio.sleep(0)
        turns.leave()
        assert not turns.try_take()
        await asyncio.gather(*waiting)
        assert turns.try_take()
        return order

    assert asyncio.run(scenario()) == ["a", "b", "c"]


@pytest.mark.parametrize("handed_before", [False, True])
def test_a_cancelled_wait_hands_its_turn_on(handed_before: bool) -> None:
    """Whether it was cancelled while it waited, or when the turn was already its own."""

    async def scenario() -> bool:
        turns = Turns()
        assert turns.try_take()
        first = asyncio.create_task(turns.take())
        second = asyncio.create_task(turns.take())
        await asyncio.sleep(0)
        if handed_before:
            turns.leave()
            first.cancel()
        else:
            first.cancel()
            await asyncio.sleep(0)
            turns.leave()
        await asyncio.wait_for(second, 5)
        turns.leave()
        return first.cancelled() and turns.try_take()

    assert asyncio.run(scenario())
