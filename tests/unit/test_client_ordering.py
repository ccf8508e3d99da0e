"""What a device has to have done before a call leaves [C14], seen from the service: a fake, with host memory."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from fake_service import DEADLINE_S, FakeService
from integration.client_kinds import Connect
from integration.client_worker import LAYOUT
from kvharbor.client import DeadlineExceeded, NoOrder, StreamOrder, aio, connect
from kvharbor.client.ordering import Wait
from moments import hurried

MARKED, WAITED = "marked", "waited"


class Recorder:
    """A StreamOrder that writes down what is asked of it, and what leaves for the service."""

    def __init__(self, service: FakeService) -> None:
        self.story: list[str] = []
        self.threads: dict[str, int] = {}
        self.failure: BaseException | None = None
        for method in ("Commit", "Handoff", "Fork", "Release", "CloseSession", "Allocate", "Extend"):
            service.before[method] = lambda method=method: self.story.append(method)  # type: ignore[misc]

    def before_commit(self) -> Wait:
        return self._marked("write")

    def before_release(self) -> Wait:
        return self._marked("all")

    def _marked(self, what: str) -> Wait:
        self.story.append(f"{MARKED} {what}")
        self.threads[MARKED] = threading.get_ident()

        def wait() -> None:
            self.threads[WAITED] = threading.get_ident()
            self.story.append(f"{WAITED} {what}")
            if self.failure is not None:
                raise self.failure

        return wait

    def take(self) -> list[str]:
        """Returns what there is, and begins anew."""
        story, self.story = self.story, []
        return story


@pytest.fixture
def order(service: FakeService) -> Recorder:
    """The order that is recorded."""
    return Recorder(service)


@pytest.fixture
def pool(open_harbor: Connect, service: FakeService, order: Recorder) -> Any:
    """An open pool in that order."""
    return open_harbor(service.target).open_pool("p", LAYOUT, order=order)


WRITES = ["marked write", "waited write"]
ALL = ["marked all", "waited all"]


def test_every_call_that_tells_of_blocks_waits_first(pool: Any, order: Recorder) -> None:
    """C14: the wait is over before the request leaves; a hand-off does both, as another reads and writes from then."""
    held, other = pool.allocate(range(20), reserve_tokens=20, group="g"), pool.allocate(range(4), group="g")
    held.extend(16)
    assert order.take() == ["Allocate", "Allocate", "Extend"]
    held.commit(16)
    assert order.take() == [*WRITES, "Commit"]
    pool.commit_many([(held, 17), (other, 4)])
    assert order.take() == [*WRITES, "Commit"]
    children = held.fork(2)
    assert order.take() == [*WRITES, "Fork"]
    held.handoff(18)
    assert order.take() == ["marked write", "marked all", "waited write", "waited all", "Handoff"]
    children[0].release()
    assert order.take() == [*ALL, "Release"]
    pool.release(request_id=children[1].request_id)
    assert order.take() == [*ALL, "Release"]
    pool.release(group="g")
    assert order.take() == [*ALL, "Release"]
    other.release()
    assert order.take() == []


def test_closing_waits_for_every_pool(open_harbor: Connect, service: FakeService, order: Recorder) -> None:
    """CloseSession frees all blocks at once."""
    harbor = open_harbor(service.target)
    harbor.open_pool("p", LAYOUT, order=order)
    harbor.close()
    assert order.take() == [*ALL, "CloseSession"]


def test_a_second_opening_may_change_the_order(pool: Any, order: Recorder, open_harbor: Connect) -> None:
    """It is the same pool; an order that is not given stays."""
    harbor = open_harbor(pool.link.address.target)
    ours = harbor.open_pool("p", LAYOUT, order=order)
    assert harbor.open_pool("p", LAYOUT).order is order
    harbor.open_pool("p", LAYOUT, order=NoOrder())
    assert type(ours.order) is NoOrder


def test_a_call_whose_wait_fails_is_not_made(pool: Any, order: Recorder, service: FakeService) -> None:
    """C14: the device has not written what was to be published; its error comes through, and nothing has changed."""
    held = pool.allocate(range(20), reserve_tokens=20)
    order.take()
    order.failure = RuntimeError("CUDA error: an illegal memory access was encountered")
    calls: list[Callable[[], Any]] = [
        lambda: held.commit(16, [7]),
        lambda: pool.commit_many([(held, 16)]),
        lambda: held.fork(1),
        lambda: held.handoff(16),
        held.release,
        lambda: pool.release(group=""),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="illegal memory access"):
            call()
    assert {entry.split()[0] for entry in order.take()} == {MARKED, WAITED}
    assert (held.computed_tokens, held.token_count, held.ended) == (0, 20, False)
    order.failure = None
    held.commit(16, [7])
    assert (service.sequences[held.id].token_count, held.token_count) == (21, 21)
    held.release()


def test_a_close_whose_wait_fails_ends_the_session_without_the_assertion(
    open_harbor: Connect, service: FakeService, order: Recorder
) -> None:
    """The end of the side socket says only that this process has gone: the service waits for the proof."""
    harbor = open_harbor(service.target)
    harbor.open_pool("p", LAYOUT, order=order)
    order.failure = RuntimeError("CUDA error")
    with pytest.raises(RuntimeError, match="CUDA error"):
        harbor.close()
    assert order.take() == ALL
    assert service.accepted[0].recv(1) == b""
    harbor.close()


def test_the_error_of_a_block_says_more_than_that_of_its_release(service: FakeService, order: Recorder) -> None:
    """A broken context fails every wait after it; what broke it comes through."""
    with connect(service.target) as harbor:
        pool = harbor.open_pool("p", LAYOUT, order=order)
        order.failure = RuntimeError("CUDA error")
        with pytest.raises(ZeroDivisionError), pool.allocate(range(4)) as held:
            raise ZeroDivisionError
        order.failure = None
        held.release()


def test_commits_and_releases_wait_too_while_the_service_is_away(
    pool: Any, order: Recorder, service: FakeService
) -> None:
    """The next process is told that the tokens are computed."""
    held = pool.allocate(range(20))
    order.take()
    service.kill()
    assert held.commit(16).pending
    held.release()
    assert order.take() == [*WRITES, *ALL]
    service.begin()
    assert pool.stats().sequence_count == 0
    assert service.calls["Resume"][-1].sequences[0].sequence.computed_tokens == 16


def test_a_commit_without_an_answer_is_not_waited_for_twice(service: FakeService, order: Recorder) -> None:
    """C5: one wait before both calls covers what it repeats."""
    answered = threading.Event()

    def hold_once() -> None:
        del service.after["Commit"]
        answered.wait(DEADLINE_S)

    with connect(service.target) as harbor:
        pool = harbor.open_pool("p", LAYOUT, order=order)
        held = pool.allocate(range(16), reserve_tokens=16)
        service.after["Commit"] = hold_once
        with hurried(pool), pytest.raises(DeadlineExceeded):
            held.commit(16, [5])
        answered.set()
        order.take()
        held.commit(17, [5, 6])
        assert order.take() == [*WRITES, "Commit", "Commit"]
        held.release()


def test_asyncio_marks_in_the_callers_thread_and_waits_in_another(service: FakeService, order: Recorder) -> None:
    """A current stream belongs to a thread; other tasks go on while the device works."""
    done = threading.Event()

    class Slow(Recorder):
        def before_commit(self) -> Wait:
            wait = super().before_commit()
            return lambda: (done.wait(DEADLINE_S), wait())

    async def body() -> None:
        slow = Slow(service)
        async with aio.connect(service.target) as harbor:
            pool = await harbor.open_pool("p", LAYOUT, order=slow)
            held = await pool.allocate(range(16))
            committing = asyncio.ensure_future(held.commit(16))
            await pool.stats()
            assert not committing.done()
            done.set()
            await committing
            assert slow.threads[MARKED] == threading.get_ident() != slow.threads[WAITED]
            await held.release()

    asyncio.run(body())


def test_host_pools_wait_for_nothing_by_themselves(open_harbor: Connect, service: FakeService) -> None:
    """A store is there when it returns."""
    order: StreamOrder = open_harbor(service.target).open_pool("p", LAYOUT).order
    assert type(order) is NoOrder
    assert (order.before_commit(), order.before_release()) == (None, None)
