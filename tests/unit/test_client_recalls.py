"""Recalls: what the engine gives back when it is asked to, in a thread of the harbor."""

import threading

from fake_chains import held
from fake_service import DEADLINE_S, FakeService
from kvharbor.client import BlockRun, InvalidField, Pool
from moments import wait
from waiting import until


def test_a_recall_is_answered_in_the_threads_of_the_harbor(service: FakeService, pool: Pool) -> None:
    """What the engine gives is released at once, although it makes no call."""
    leased = pool.blocks.lease(4, 4).blocks
    recalled: list[int] = []

    def give(block_count: int) -> BlockRun:
        recalled.append(block_count)
        return leased[:block_count]

    pool.blocks.on_recall = give
    service.blocks.recall(3)
    until(lambda: len(service.blocks.own) == 1)
    assert recalled == [3]
    pool.blocks.flush()
    assert held(pool) == {*leased[3:]}


def test_a_recall_finds_its_way_after_a_restart(service: FakeService, pool: Pool) -> None:
    """The stream is opened anew by itself, although the engine makes no call."""
    leased = pool.blocks.lease(1, 1).blocks
    pool.blocks.on_recall = lambda _: leased
    service.restart()
    service.wait_until_resumed()
    assert service.blocks.opened.wait(DEADLINE_S)
    service.blocks.recall(1)
    until(lambda: not service.blocks.own)


def test_what_a_callback_raises_does_not_end_the_stream(service: FakeService, pool: Pool) -> None:
    """It is the engine's own mistake, and is logged."""
    recalled = threading.Event()

    def broken(_: int) -> BlockRun:
        recalled.set()
        raise ValueError("a mistake")

    pool.blocks.on_recall = broken
    pool.blocks.lease(1, 1)
    service.blocks.recall(1)
    wait(recalled)
    assert len(pool.blocks.lease(1, 1).blocks) == 1


def test_a_callback_cannot_wait_for_an_answer(service: FakeService, pool: Pool) -> None:
    """It is called in the thread that would bring it."""
    mistakes: list[BaseException] = []

    def waiting(_: int) -> BlockRun:
        for call in (lambda: pool.blocks.lease(1, 1), pool.blocks.flush):
            try:
                call()
            except InvalidField as mistake:
                mistakes.append(mistake)
        return BlockRun.of([])

    pool.blocks.on_recall = waiting
    pool.blocks.lease(1, 1)
    service.blocks.recall(1)
    until(lambda: len(mistakes) == 2)
