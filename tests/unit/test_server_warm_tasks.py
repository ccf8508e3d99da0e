"""The book of warm tasks: who waits, who is at work, who is over."""

import struct

import pytest

from kvharbor.pool import PinView, Prompt
from kvharbor.server.errors import TooManyWarmTasks
from kvharbor.server.pools.warm_tasks import MAX_CLAIMS, MAX_TASKS, Claim, WarmTask, WarmTasks

FIRST, SECOND = Claim(1, "a"), Claim(2, "b")
WHOLE = PinView(32, 0, filling=True)
HALF = PinView(16, 16, filling=True)
LEFT = PinView(16, 16, filling=False)


def prompt(*ids: int) -> Prompt:
    return Prompt(struct.pack(f"<{len(ids)}I", *ids))


def put(book: WarmTasks, name: str, *ids: int, expires_at: float | None = None) -> WarmTask:
    return book.put(name, prompt(*ids), expires_at, filling=False)


def claimed(book: WarmTasks, claim: Claim, now: float = 0.0) -> WarmTask | None:
    task = book.next(now)
    if task is not None:
        book.fill(task, claim)
    return task


def counts(book: WarmTasks) -> tuple[int, int]:
    return book.waiting_count, book.filling_count


def test_unfinished_tasks_are_counted_without_those_whose_time_is_over() -> None:
    """A task that waits has no timer: until somebody looks for the next one it lies there, expired."""
    book = WarmTasks()
    put(book, "filled", 1)
    claimed(book, FIRST)
    put(book, "waits", 2)
    put(book, "expires", 3, expires_at=5.0)
    assert (book.unfinished(4.0), book.unfinished(5.0)) == ((2, 1), (1, 1))


def test_the_task_that_waits_longest_is_claimed_first_and_once() -> None:
    """A second claimer gets the next one, a third none."""
    book = WarmTasks()
    first, second = put(book, "x", 1), put(book, "y", 2)
    assert claimed(book, FIRST) is first
    assert claimed(book, SECOND) is second
    assert claimed(book, FIRST) is None
    assert counts(book) == (0, 2)


def test_a_repeated_claim_finds_its_task_by_request_id() -> None:
    """One without a request_id is never a repetition."""
    book = WarmTasks()
    task = put(book, "x", 1)
    claimed(book, FIRST)
    assert book.claimed(FIRST) is task
    assert book.claimed(SECOND) is None
    anonymous = put(book, "y", 2)
    book.fill(anonymous, Claim(1, ""))
    assert book.claimed(Claim(1, "")) is None


def test_a_whole_pin_ends_its_task_and_a_half_one_does_not() -> None:
    """The end wakes those who wait for it."""
    book = WarmTasks()
    task = put(book, "x", 1)
    claimed(book, FIRST)
    assert book.settle(lambda _: HALF, 0.0) == []
    assert (counts(book), task.over.is_set()) == ((0, 1), False)
    assert book.settle(lambda _: WHOLE, 0.0) == []
    assert (counts(book), task.over.is_set(), "x" in book) == ((0, 0), True, False)


@pytest.mark.parametrize("pin", [LEFT, None])
def test_a_task_whose_filler_left_waits_again_behind_the_others(pin: PinView | None) -> None:
    """Also when nothing was committed, so that no pin is left."""
    book = WarmTasks()
    task = put(book, "x", 1)
    claimed(book, FIRST)
    other = put(book, "y", 2)
    assert book.settle(lambda _: pin, 0.0) == []
    assert [claimed(book, SECOND), claimed(book, SECOND)] == [other, task]


def test_a_task_is_given_up_after_so_many_claims() -> None:
    """It is returned, so that the log can tell."""
    book = WarmTasks()
    task = put(book, "x", 1)
    for number in range(MAX_CLAIMS - 1):
        claimed(book, Claim(number, "c"))
        assert book.settle(lambda _: LEFT, 0.0) == []
    claimed(book, FIRST)
    assert book.settle(lambda _: LEFT, 0.0) == [task]
    assert (counts(book), task.over.is_set()) == ((0, 0), True)


def test_a_filler_that_claimed_nothing_costs_no_claim() -> None:
    """A caller of Warmup at work on the same prefix: the task waits only when that came to nothing."""
    book = WarmTasks()
    task = book.put("x", prompt(1), None, filling=True)
    assert (book.next(0.0), task.claim_count) == (None, 0)
    book.settle(lambda _: LEFT, 0.0)
    assert (book.next(0.0), task.claim_count) == (task, 0)


def test_the_same_order_renews_its_time_and_another_one_takes_its_place() -> None:
    """Also while it is being filled; the task that was replaced is over."""
    book = WarmTasks()
    task = put(book, "x", 1, expires_at=5.0)
    claimed(book, FIRST)
    assert put(book, "x", 1, expires_at=9.0) is task
    assert (task.expires_at, counts(book)) == (9.0, (0, 1))
    other = put(book, "x", 2)
    assert (task.over.is_set(), book.next(0.0), counts(book)) == (True, other, (1, 0))
    book.fill(task, SECOND)
    assert counts(book) == (1, 0)


def test_time_ends_tasks_that_wait_and_those_whose_filler_left() -> None:
    """One that is being filled ends with its pin, when the pool ends that."""
    book = WarmTasks()
    waiting, filling = put(book, "x", 1, expires_at=5.0), book.put("y", prompt(2), 5.0, filling=True)
    assert book.next(4.9) is waiting
    assert (book.next(5.0), waiting.over.is_set()) == (None, True)
    assert book.settle(lambda _: HALF, 5.0) == []
    assert not filling.over.is_set()
    assert book.settle(lambda _: None, 5.0) == []
    assert filling.over.is_set()


def test_an_ended_task_is_over_whatever_it_was_doing() -> None:
    """Unwarm and the end of the pool."""
    book = WarmTasks()
    tasks = [put(book, "x", 1), put(book, "y", 2), put(book, "z", 3)]
    claimed(book, FIRST)
    assert (book.end("x"), book.end("x")) == (True, False)
    book.end_all()
    assert [task.over.is_set() for task in tasks] == [True] * 3


def test_the_tasks_of_a_pool_are_bounded() -> None:
    """The refusal has both numbers; a renewal is no new task, and an expired one makes room."""
    book = WarmTasks()
    for number in range(MAX_TASKS):
        put(book, str(number), number, expires_at=9.0 if number else 5.0)
    book.require_room("1", 0.0)
    with pytest.raises(TooManyWarmTasks, match="1024 warm tasks") as refused:
        book.require_room("new", 0.0)
    assert refused.value.metadata() == {"taskCount": "1024", "limit": "1024"}
    book.require_room("new", 5.0)
