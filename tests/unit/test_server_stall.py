"""The service's clock: it stands still while the process does not run."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kvharbor.server.process import stall
from kvharbor.server.process.stall import MOST_LATE_S, TICK_S, ServiceLoop

STALL_S = 100.0


class Monotonic:
    """The kernel's clock, which a test can have jump, as it does for a process that was stopped.

    Otherwise it goes on only while a loop that it is `beneath` sleeps, and then at once; a look at it takes no time to
    speak of.
    """

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        """Returns seconds."""
        self.now_s += 1e-6
        return self.now_s

    def beneath(self, loop: Any) -> None:
        """Has it pass the time for which a loop sleeps."""
        look = loop._selector.select

        def select(timeout_s: float) -> Any:
            ready = look(0)
            if not ready:
                self.now_s += timeout_s
            return ready

        loop._selector.select = select


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Monotonic:
    """The clock beneath the loop's."""
    clock = Monotonic()
    monkeypatch.setattr(stall, "time", clock)
    return clock


def run(
    kernel: Monotonic, scenario: Callable[[ServiceLoop, list[tuple[float, float]]], Coroutine[Any, Any, None]]
) -> None:
    """Runs a scenario on a loop that ticks; the list gets what each tick reports."""
    ticks: list[tuple[float, float]] = []

    async def ticking(loop: ServiceLoop) -> None:
        loop.tick(lambda late_s, stalled_s: ticks.append((late_s, stalled_s)))
        await scenario(loop, ticks)

    with asyncio.Runner(loop_factory=ServiceLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, ServiceLoop)
        kernel.beneath(loop)
        runner.run(ticking(loop))


def test_a_stall_has_passed_for_nobody(kernel: Monotonic) -> None:
    """S21: a wait of three ticks is not over after a hundred seconds in which the process was stopped."""

    async def scenario(loop: ServiceLoop, ticks: list[tuple[float, float]]) -> None:
        began_at = loop.time()
        waiting = asyncio.create_task(asyncio.sleep(3 * TICK_S))
        await asyncio.sleep(TICK_S)
        kernel.now_s += STALL_S
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
        await waiting
        assert 3 * TICK_S <= loop.time() - began_at < 3 * TICK_S + 1.0
        (stalled_s,) = (stalled_s for _, stalled_s in ticks if stalled_s)
        assert stalled_s == pytest.approx(STALL_S, abs=1.0)
        assert loop.stalled_s == stalled_s

    run(kernel, scenario)


def test_what_is_only_a_little_late_counts_as_time(kernel: Monotonic) -> None:
    """S21: the lag is told, and no clock is put back for it."""

    async def scenario(loop: ServiceLoop, ticks: list[tuple[float, float]]) -> None:
        await asyncio.sleep(TICK_S / 2)
        kernel.now_s += MOST_LATE_S * 0.8
        while not ticks:
            await asyncio.sleep(0)
        assert loop.stalled_s == 0
        assert 0 < ticks[0][0] < MOST_LATE_S
        assert ticks[0][1] == 0

    run(kernel, scenario)


def test_time_does_not_go_back_behind_what_was_told_of_a_stall(kernel: Monotonic) -> None:
    """S21: before it was one, the tick was only a little late."""

    async def scenario(loop: ServiceLoop, ticks: list[tuple[float, float]]) -> None:
        times = [loop.time()]
        for _ in range(20):
            kernel.now_s += MOST_LATE_S / 3
            times.append(loop.time())
        kernel.now_s += STALL_S
        times.append(loop.time())
        assert times == sorted(times)
        assert times[-1] - times[0] <= TICK_S + MOST_LATE_S
        assert loop.stalled_s > STALL_S

    run(kernel, scenario)


def test_time_never_goes_back_and_goes_on_over_processes(kernel: Monotonic) -> None:
    """S21: also from one that has stalled to its successor."""

    async def scenario(loop: ServiceLoop, ticks: list[tuple[float, float]]) -> None:
        times = [loop.time()]
        for _ in range(3):
            kernel.now_s += STALL_S
            times += [loop.time(), loop.time()]
            await asyncio.sleep(2 * TICK_S)
        assert times == sorted(times)
        assert times[-1] - times[0] < 3 * 4 * TICK_S
        successor = ServiceLoop(loop.stalled_s)
        try:
            now = loop.time()
            assert 0 <= successor.time() - now < 1.0
        finally:
            successor.close()

    run(kernel, scenario)
