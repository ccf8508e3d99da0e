"""An event loop for tests of waits: its time passes only while everybody sleeps, and then at once."""

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from typing import Any

Ready = list[tuple[selectors.SelectorKey, int]]


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self, pass_time: Callable[[float], None]) -> None:
        super().__init__()
        self._pass_time = pass_time

    def select(self, timeout: float | None = None) -> Ready:
        if timeout is None:
            raise AssertionError("everybody waits for something that nobody will do: a deadlock")
        ready = super().select(0)
        if not ready:
            self._pass_time(timeout)
        return ready


class JumpingLoop(asyncio.SelectorEventLoop):
    """`time()` begins at 1,000."""

    def __init__(self) -> None:
        self._now = 1000.0
        super().__init__(_JumpingSelector(self._pass_time))

    def time(self) -> float:
        return self._now

    def _pass_time(self, seconds: float) -> None:
        self._now += seconds


def run_jumping(scenario: Callable[[], Awaitable[None]]) -> None:
    """Runs a scenario on such a loop; one that could go on for ever fails after an hour of its time."""

    async def limited() -> Any:
        async with asyncio.timeout(3600):
            await scenario()

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(limited())
