"""Waiting for a device on an event loop."""

import asyncio

from kvharbor.client import ordering
from kvharbor.client.ordering import Wait


async def wait_for(*marked: Wait | None) -> None:
    """Waits in a thread for what a StreamOrder has marked in this one; other tasks go on meanwhile."""
    waits = [wait for wait in marked if wait is not None]
    if waits:
        await asyncio.to_thread(ordering.wait_for, *waits)
