"""Scenarios of a test on an event loop of their own."""

import asyncio
from collections.abc import Awaitable, Callable

DEADLINE_S = 10.0


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    """Runs a scenario with a deadline."""

    async def limited() -> None:
        await asyncio.wait_for(scenario(), DEADLINE_S)

    asyncio.run(limited())


async def settled() -> None:
    """Lets everything run that waits for nothing from outside: what has not happened after it waits for something."""
    for _ in range(300):
        await asyncio.sleep(0)
