"""Blocks for what runs, call by call: when there is nothing to look at, what is asked for, and what is kept."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from kvharbor.client import BlockRun, Full, Leased, PoolExhausted
from kvharbor.engines.vllm.room import RUNNING_PER_SPARE, Room


@dataclass
class Store:
    """A store of so many blocks."""

    count: int = 0
    target_block_count: int = 1

    def __len__(self) -> int:
        return self.count

    def take(self, block_count: int) -> BlockRun:
        if block_count > self.count:
            raise PoolExhausted("the store is empty")
        self.count -= block_count
        return BlockRun.of((99, 1) for _ in range(block_count))

    def stock_up(self) -> None:
        """Has it refilled, later."""

    def rest(self) -> None:
        self.count = 0


class Around:
    """A room with what is around it: `answers` are how many blocks each lease gives, or none."""

    def __init__(self, *answers: int, free: int = 0, store: Store | None = None) -> None:
        self.answers = [*answers]
        self.status = SimpleNamespace(available_block_count=9, waiting_count=0, recall_count=0)
        self.asked: list[tuple[int, int, bool]] = []
        self.flushed = 0
        self.free_block_queue = SimpleNamespace(num_free_blocks=free)
        self.released: list[tuple[int, int]] = []
        around: Any = self
        self.room = Room(around, around, self._flush, lambda: store)

    def lend(self, run: BlockRun) -> None:
        self.free_block_queue.num_free_blocks += len(run)

    def give_back_free(self, count: int) -> None:
        self.free_block_queue.num_free_blocks -= count

    def lease(self, least: int, want: int, *, growth: bool) -> Leased:
        self.asked.append((least, want, growth))
        if not (count := self.answers.pop(0)):
            raise Full("full")
        return Leased(BlockRun.of((number, 1) for number in range(1, count + 1)))

    def _flush(self) -> None:
        self.flushed += 1
        self.released.clear()


@pytest.mark.parametrize(("free", "stock", "expected"), [(0, 0, False), (0, 1, True), (1, 0, True), (2, 1, False)])
def test_a_room_is_settled_with_one_block_for_the_next_step(free: int, stock: int, expected: bool) -> None:
    """[E29] With more there is some to give back, with none some to get."""
    around = Around(free=free, store=Store(stock))
    around.room.begin_step(3)
    around.room.trim(2)
    assert around.room.is_settled(3) == expected


@pytest.mark.parametrize("free", [0, 1])
def test_a_room_is_not_settled_where_others_run_or_want_something(free: int) -> None:
    """[E14] [E29] What is in store for them is another number, and what is spare is theirs."""
    around = Around(free=free, store=(store := Store(1)))
    room = around.room
    room.begin_step(3)
    room.trim(1)
    assert room.is_settled(3)
    assert not room.is_settled(4)
    around.status.waiting_count = 1
    assert not room.is_settled(3)
    around.status.waiting_count, around.status.recall_count = 0, 1
    assert not room.is_settled(3)
    room.begin_step(0)
    assert not room.is_settled(0)
    assert store.target_block_count == 1


def test_a_room_with_none_is_settled_while_the_store_does_not_refill() -> None:
    """[E29] Of four blocks, when one is gone."""
    around = Around(store=(store := Store(4)))
    room = around.room
    running_count = 3 * RUNNING_PER_SPARE
    room.begin_step(running_count)
    room.trim(0)
    assert store.target_block_count == 4
    assert room.is_settled(running_count)
    store.take(1)
    assert not room.is_settled(running_count)


@pytest.mark.parametrize(("waiting_count", "recall_count"), [(0, 0), (1, 0), (0, 1)])
def test_the_spare_block_goes_back_where_somebody_wants_it(waiting_count: int, recall_count: int) -> None:
    """[E14] And when nothing runs."""
    around = Around(free=3)
    around.status.waiting_count, around.status.recall_count = waiting_count, recall_count
    around.room.begin_step(1)
    around.room.trim(1)
    assert around.room.free_count == (1 if waiting_count or recall_count else 2)
    around.room.begin_step(0)
    around.room.trim(1)
    assert around.room.free_count == 1


def test_a_step_asks_once_where_there_is_none() -> None:
    """[E27] The next step asks anew, and what runs goes before what waits."""
    around = Around(0, 1)
    around.room.begin_step(2)
    for _ in range(3):
        around.room.when_empty()
    assert around.asked == [(1, 1, True)]
    around.room.begin_step(2)
    around.room.when_empty()
    assert around.room.free_count == 1
    assert len(around.asked) == 2


def test_a_room_that_was_refused_is_not_settled_when_its_store_has_some_again() -> None:
    """[E27] The next step may need more than that, and asks anew."""
    around = Around(0, 1, store=(store := Store(1)))
    around.room.begin_step(2)
    around.room.trim(0)
    assert around.room.is_settled(2)
    for _ in range(2):
        around.room.when_empty()
        around.free_block_queue.num_free_blocks = 0  # each of the two takes what there is
    store.count = 1
    assert not around.room.is_settled(2)
    around.room.begin_step(2)
    around.room.when_empty()
    around.free_block_queue.num_free_blocks = 0
    around.room.when_empty()
    assert (around.room.free_count, len(around.asked)) == (1, 2)


def test_a_step_asks_again_for_what_a_request_has_just_made_room() -> None:
    """[E15] What it had is told first."""
    around = Around(0, 1)
    around.room.begin_step(2)
    around.room.when_empty()
    around.released.append((7, 1))
    around.room.when_empty()
    assert (around.flushed, around.room.free_count) == (1, 1)


def test_the_store_goes_before_a_call() -> None:
    """[E27] And nothing is taken where nothing runs."""
    around = Around(store=(store := Store(1)))
    around.room.begin_step(0)
    around.room.when_empty()
    assert (len(store), around.room.free_count) == (1, 0)
    around.room.begin_step(1)
    around.room.when_empty()
    assert (len(store), around.room.free_count) == (0, 1)
    assert not around.asked


@pytest.mark.parametrize("growth", [False, True])
def test_what_is_required_is_leased_as_far_as_it_is_missing(growth: bool) -> None:
    """Without a call where there is enough, or nothing to be had."""
    around = Around(2, free=3)
    assert around.room.require(3, growth=growth)
    assert not around.asked
    assert around.room.require(5, growth=growth)
    assert around.asked == [(2, 2, growth)]
    around.status.available_block_count = 0
    assert not around.room.require(6, growth=growth)
    assert len(around.asked) == 1
