"""Signs of a session that is at work: when they are due, and that a stream gives them [C21]."""

import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_process import refused_item
from fake_service import DEADLINE_S, FakeService
from integration.client_worker import LAYOUT
from kvharbor.client import Chain, Harbor, HarborClosed, Namespace, Pool, connect, signs
from kvharbor.client.signs import LONGEST_S, PERIOD_S, Signs
from waiting import until

PROMPT = Chain(keys=bytes(32), namespace=Namespace(scheme="test/sha256"), table_block_count=1, computes=True)
SHORT_S = 0.02


class Bench:
    """Signs on a clock of the test's; what is told and awoken is counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        self.told: list[float] = []
        self.awoken = 0
        monkeypatch.setattr("kvharbor.client.signs.time.monotonic", lambda: self.now_s)
        self.signs = Signs(weakref.WeakMethod(self.awaken))
        self.step = self.signs.step(weakref.WeakMethod(self.tell))

    def awaken(self) -> None:
        self.awoken += 1

    def tell(self) -> None:
        self.told.append(self.now_s)

    def let_pass(self, duration_s: float) -> None:
        """Time passes, in which the thread looks when it said that it would."""
        until_s = self.now_s + duration_s
        while (pause_s := self.signs.pause_s()) is not None and self.now_s + pause_s <= until_s:
            self.now_s += pause_s
            if pause_s == 0:
                self.signs.give()
        self.now_s = until_s


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """One."""
    return Bench(monkeypatch)


def test_a_step_that_lasts_gives_a_sign_every_half_second(bench: Bench) -> None:
    """The first when it has lasted so long, none when it is over, and a failed one is over too."""

    def fail() -> None:
        with bench.step:
            bench.let_pass(1.9)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert bench.told == pytest.approx([1000.5, 1001.0, 1001.5])
    bench.let_pass(5.0)
    assert len(bench.told) == 3


def test_short_steps_in_a_row_give_no_sign_and_wake_the_thread_once(bench: Bench) -> None:
    """Nor do those that overlap, each begun before the one before is over."""
    assert bench.signs.pause_s() is None
    for _ in range(200):
        bench.step.begin()
        bench.let_pass(0.02)
        bench.step.end()
        bench.let_pass(0.001)
    for _ in range(200):
        bench.step.begin()
        bench.let_pass(0.02)
    assert (bench.told, bench.awoken) == ([], 1)


def test_the_thread_sleeps_on_when_nothing_has_begun_for_a_while(bench: Bench) -> None:
    """An idle engine costs nothing; the next step wakes it."""
    with bench.step:
        bench.let_pass(0.1)
    bench.let_pass(3.0)
    assert (bench.signs.pause_s(), bench.signs.dozing) == (None, True)
    bench.step.begin()
    assert (bench.awoken, bench.signs.dozing) == (2, False)


def test_a_step_that_hangs_gives_no_sign_for_ever(bench: Bench) -> None:
    """The service would not believe it; it is the same with the step of an engine that has died without a word."""
    bench.step.begin()
    bench.let_pass(10 * LONGEST_S)
    assert bench.told[-1] == pytest.approx(1000.0 + LONGEST_S, abs=PERIOD_S + 1e-6)
    assert bench.signs.dozing


def test_each_pool_has_its_own_steps(bench: Bench) -> None:
    """Of two engines in one session the one that is at work says so."""
    idle: list[float] = []

    class Other:
        def tell(self) -> None:
            idle.append(bench.now_s)

    other = Other()
    step = bench.signs.step(weakref.WeakMethod(other.tell))
    with bench.step:
        bench.let_pass(0.6)
        with step:
            bench.let_pass(0.45)
        assert (len(bench.told), idle) == (2, [])
        bench.signs.drop(bench.step)
        bench.signs.drop(bench.step)
        bench.let_pass(2.0)
    assert len(bench.told) == 2


@given(st.lists(st.tuples(st.integers(1, 200), st.integers(0, 100)), max_size=12))
def test_signs_are_given_as_the_rule_says(steps: list[tuple[int, int]]) -> None:
    """Against the rule, step by step: one each period from its beginning to its end. Times are in parts of a period."""
    part_s = PERIOD_S / 64
    with pytest.MonkeyPatch.context() as patch:
        bench = Bench(patch)
        for step, pause in steps:
            began_s, before = bench.now_s, len(bench.told)
            with bench.step:
                bench.let_pass(step * part_s)
            given_s = [told - began_s for told in bench.told[before:]]
            assert given_s == [PERIOD_S * count for count in range(1, step // 64 + 1)]
            bench.let_pass(pause * part_s)


# On a stream


@pytest.fixture
def harbor(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harbor]:
    """A harbor of the fake, that gives signs soon."""
    monkeypatch.setattr(signs, "PERIOD_S", SHORT_S)
    with connect(service.target) as opened:
        yield opened


@pytest.fixture
def pool(harbor: Harbor) -> Pool:
    """Its pool."""
    return harbor.open_pool("p", LAYOUT)


def sign_count(service: FakeService) -> int:
    return len(service.blocks.of_kind("computing"))


def until_more(service: FakeService, more: int = 2) -> None:
    """Waits until some more signs have come."""
    before = sign_count(service)
    until(lambda: sign_count(service) >= before + more)


def test_a_stream_tells_of_the_step_until_it_is_over(service: FakeService, pool: Pool) -> None:
    """It is the pool's, and what is called meanwhile is sent as always."""
    pool.blocks.acquire([PROMPT])
    with pool.blocks.computing:
        until_more(service)
        pool.blocks.lease(1, 1)
        until_more(service)
    pool.blocks.flush()
    kinds = [request.WhichOneof("call") for request in service.blocks.requests]
    assert (kinds[0], kinds.count("lease")) == ("acquire", 1)
    assert {call.pool_id for call in service.blocks.of_kind("computing")} == {service.pool_id}
    until(lambda: pool.link.stream.signs.dozing)
    pool.blocks.flush()
    count = sign_count(service)
    pool.blocks.lease(1, 1)
    assert sign_count(service) == count


def test_a_session_without_a_stream_gets_one(service: FakeService, pool: Pool) -> None:
    """One that has sequences only has made no call on it."""
    assert not service.blocks.opened.is_set()
    with pool.blocks.computing:
        until_more(service)


def test_signs_go_on_with_the_next_process(service: FakeService, pool: Pool) -> None:
    """Also in a step that began before, and where one begins while nobody is there; no call fails for it."""
    pool.blocks.acquire([PROMPT])
    pool.blocks.computing.begin()
    until_more(service)
    service.restart()
    until_more(service)
    service.kill()
    pool.blocks.computing.end()
    until(lambda: not pool.link.standing.settled(even_away=False))
    pool.blocks.computing.begin()
    service.begin()
    until_more(service)
    pool.blocks.computing.end()
    pool.blocks.flush()


def test_a_service_that_does_not_know_signs_is_not_troubled(
    service: FakeService, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses them, and the stream goes on."""
    monkeypatch.setattr(service.blocks, "_computing", lambda _: refused_item("INVALID_FIELD", 3))
    refused: list[object] = []
    pool.blocks.on_refusal = refused.append
    pool.blocks.acquire([PROMPT])
    with pool.blocks.computing:
        until_more(service)
    pool.blocks.flush()
    assert refused == []


def test_a_closed_harbor_does_not_mind(service: FakeService, pool: Pool, harbor: Harbor) -> None:
    """Steps may begin and end there: nothing is told."""
    pool.blocks.acquire([PROMPT])
    with pool.blocks.computing:
        until_more(service)
    harbor.close()
    count = sign_count(service)
    with pool.blocks.computing:
        pass
    with pytest.raises(HarborClosed):
        pool.blocks.flush()
    assert sign_count(service) == count


def test_a_fork_does_not_mind(service: FakeService, pool: Pool) -> None:
    """Where a thread that is not there in the child has the lock of what is sent; the parent goes on."""
    pool.blocks.acquire([PROMPT])
    sending, forked = threading.Event(), threading.Event()

    def send() -> None:
        with pool.link.stream._outbox.paused():
            sending.set()
            forked.wait(DEADLINE_S)

    sender = threading.Thread(target=send)
    with pool.blocks.computing:
        until_more(service)
        sender.start()
        assert sending.wait(DEADLINE_S)
        child = os.fork()
        if not child:
            pool.link.stream.signs.dozing = True
            with pool.blocks.computing:
                os._exit(0)
        forked.set()
        sender.join(DEADLINE_S)
        try:
            assert until(lambda: os.waitpid(child, os.WNOHANG), any) == (child, 0)
        except AssertionError:
            os.kill(child, signal.SIGKILL)
            raise
        until_more(service)


def test_a_step_under_way_keeps_no_forgotten_harbor_alive(service: FakeService) -> None:
    """Its threads end, and with them the session."""
    harbor: Harbor | None = connect(service.target)
    assert harbor is not None
    step = harbor.open_pool("p", LAYOUT).blocks.computing
    step.begin()
    service.blocks.opened.wait(DEADLINE_S)
    threads = [each for each in threading.enumerate() if each.name == "kvharbor-stream"]
    del harbor
    gc.collect()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert [thread.is_alive() for thread in threads] == [False]
    step.begin()
    step.end()


def test_what_the_thread_and_a_step_do_at_once_leaves_no_step_unseen() -> None:
    """[C21] Wherever the thread is about to doze, a step that begins then is seen or wakes it."""
    awoken = threading.Event()

    class Thread:
        def awaken(self) -> None:
            awoken.set()

        def tell(self) -> None:
            pass

    thread = Thread()
    tested = Signs(weakref.WeakMethod(thread.awaken))
    step = tested.step(weakref.WeakMethod(thread.tell))
    looks: list[Callable[[], None]] = [lambda: None, step.begin]
    pause_s = tested._pause_s

    def look() -> float | None:
        found = pause_s()
        looks.pop(0)()
        return found

    for place in (0, 1):
        step.end()
        step.began_s = -LONGEST_S
        tested.dozing = False
        looks[:] = [step.begin, lambda: None] if place == 0 else [lambda: None, step.begin]
        tested._pause_s = look  # type: ignore[method-assign]
        awoken.clear()
        assert tested.pause_s() is not None or awoken.is_set()
