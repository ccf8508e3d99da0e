"""What an engine's requests hold together: random requests over a small pool, against an owner that checks."""

import random
import threading
from typing import Any

import pytest

from fake_blocks import FakeCalls, FakeOwner
from kvharbor.client import BlockRun, Chain, EpochEnded, Namespace
from kvharbor.engines.request_blocks import MOST_AHEAD, RequestBlocks
from kvharbor.engines.transformers_cb.admissions import Admissions

P = 2


class Engine:
    """Requests that grow, fork, publish and end."""

    def __init__(self, owner: FakeOwner) -> None:
        self.calls: FakeCalls = owner.session()
        self.held = RequestBlocks(self.calls, Namespace())  # type: ignore[arg-type]
        self.calls.on_recall = self.held.recall
        self.admissions = Admissions(self.calls, self.held, Namespace(), P)  # type: ignore[arg-type]
        self.tables: dict[str, list[int]] = {}
        self.texts: dict[str, list[int]] = {}
        self.published: dict[str, int] = {}

    def admit(self, name: str, prompt: list[int]) -> bool:
        """Admits it, or leaves it waiting."""
        admitted = self.admissions.admit(name, prompt)
        if admitted is None:
            return False
        self.tables[name], self.published[name] = admitted.table, admitted.reused_block_count
        self.texts[name] = list(prompt)
        return True

    def grow(self, name: str, token: int) -> None:
        """Decodes a token, if there is room for it."""
        text = self.texts[name]
        if len(text) == len(self.tables[name]) * P:
            if not self.held.grow(1, ahead=3):
                return
            self.tables[name] += self.held.take(1)
        text.append(token)
        full = (len(text) - 1) // P
        first, self.published[name] = self.published[name], max(self.published[name], full)
        self.held.publish(self.tables[name], first, full, tokens=text[first * P : full * P])

    def fork(self, name: str, child: str) -> None:
        """Shares what is published."""
        shared = self.tables[name][: self.published[name]]
        self.held.share(shared)
        self.tables[child], self.texts[child] = list(shared), self.texts[name][: len(shared) * P]
        self.published[child] = len(shared)

    def end(self, name: str) -> None:
        """Ends it."""
        self.held.drop(self.tables.pop(name))
        del self.texts[name]
        del self.published[name]

    def check(self) -> None:
        """No block is counted twice, and what requests use is held."""
        held = {block.block_id for block in self.calls.held()}
        used = {block_id for table in self.tables.values() for block_id in table}
        assert used <= held
        assert len(used) == self.held.used_count
        for name, table in self.tables.items():
            assert len(set(table)) == len(table)
            for place in range(self.published[name]):
                content = self.calls.owner.blocks[table[place]].content
                assert content is not None
                assert list(content) == self.texts[name][: (place + 1) * P]


@pytest.mark.parametrize("usable_count", [8, 14, 40])
@pytest.mark.parametrize("seed", range(5))
def test_random_requests_leave_nothing_behind(usable_count: int, seed: int) -> None:
    """Two engines, 1,500 events with forks, waits, recalls and cancels: no block in two hands, none lost."""
    chosen = random.Random(seed)
    owner = FakeOwner(usable_count, P)
    engines = [Engine(owner) for _ in range(2)]
    waiting: list[dict[str, list[int]]] = [{}, {}]
    for number in range(1500):
        side = chosen.randrange(2)
        engine, queue = engines[side], waiting[side]
        event = chosen.random()
        if event < 0.15 and len(queue) < 3:
            queue[f"r{number}"] = [*([chosen.randrange(3)] * chosen.randrange(1, 9)), chosen.randrange(100, 999)]
        elif event < 0.35 and queue:
            name = next(iter(queue))
            if engine.admit(name, queue[name]):
                del queue[name]
        elif event < 0.4 and queue:
            name = chosen.choice(list(queue))
            engine.admissions.cancel(name)
            del queue[name]
        elif event < 0.45 and engine.tables:
            engine.fork(chosen.choice(list(engine.tables)), f"f{number}")
        elif event < 0.75 and engine.tables:
            engine.grow(chosen.choice(list(engine.tables)), chosen.randrange(3))
        elif event < 0.95 and engine.tables:
            engine.end(chosen.choice(list(engine.tables)))
        else:
            engine.held.give_back_spare()
        for each in engines:
            each.check()
    for engine in engines:
        engine.admissions.cancel()
        for name in list(engine.tables):
            engine.end(name)
        engine.held.give_back_spare()
    for engine in engines:
        assert engine.calls.held() == []
    assert len(owner.free) + len(owner.index) == usable_count
    assert owner.evicted_count or usable_count == 40


def test_a_grant_is_confirmed_before_it_is_used() -> None:
    """The last request here that used a block ends between the grant and the engine's next look at it."""
    owner = FakeOwner(6, P)
    other, engine = owner.session(), Engine(owner)
    assert engine.admit("first", [1, 1, 2])
    engine.grow("first", 2)
    hog = other.lease(3, 3).blocks
    assert not engine.admit("second", [1, 1, *range(10, 16)])
    other.release(hog)  # from here on it is granted, [1, 1] included
    engine.end("first")
    engine.held.give_back_spare()
    if engine.admit("second", [1, 1, *range(10, 16)]):
        engine.check()
    engine.admissions.cancel()
    for name in list(engine.tables):
        engine.end(name)
    engine.held.give_back_spare()
    assert engine.calls.held() == []


def test_recalled_blocks_are_spare_ones_that_nobody_was_promised() -> None:
    """Between `grow` and `take` another engine may ask for room; it gets what is left over."""
    owner = FakeOwner(MOST_AHEAD + 2, P)
    engine = Engine(owner)
    assert engine.held.grow(2, ahead=100)
    assert engine.held.spare_count == MOST_AHEAD + 2
    recalled = engine.held.recall(100)
    assert len(recalled) == MOST_AHEAD
    engine.calls.release(recalled)
    assert len(engine.held.take(2)) == 2
    assert not engine.held.grow(MOST_AHEAD + 1)
    assert len(engine.held.recall(100)) == 0


def test_recalls_of_another_thread_take_nothing_that_is_in_use() -> None:
    """A thread that recalls all the time, beside one that grows and ends: every block is in one hand."""
    owner = FakeOwner(30, P)
    engine = Engine(owner)
    over = threading.Event()

    def recall() -> None:
        while not over.is_set():
            with owner.lock:
                engine.calls.release(engine.held.recall(3))

    thread = threading.Thread(target=recall)
    thread.start()
    try:
        for _ in range(300):
            if engine.held.grow(3, ahead=5):
                table = engine.held.take(3)
                assert engine.held.used_count == len({*table}) == 3
                engine.held.drop(table)
    finally:
        over.set()
        thread.join()
    engine.held.give_back_spare()
    assert engine.calls.held() == []


def test_what_comes_while_the_epoch_ends_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer of the new epoch may come before this engine has forgotten the old one, and would be forgotten too."""
    engine = Engine(FakeOwner(20, P))
    for name in ("lease", "acquire"):
        call = getattr(engine.calls, name)

        def ends(*arguments: Any, call: Any = call, **keywords: Any) -> Any:
            engine.held.epoch_ended = True
            return call(*arguments, **keywords)

        monkeypatch.setattr(engine.calls, name, ends)
    for ask in (lambda: engine.held.grow(3, ahead=3), lambda: engine.admissions.admit("a", [1, 2, 3, 4, 5])):
        with pytest.raises(EpochEnded):
            ask()
        with pytest.raises(EpochEnded):
            ask()  # not even asked for
        assert engine.calls.held() == []
        engine.held.forget()


def test_an_owner_that_waits_serves_in_order() -> None:
    """The fake itself: a prompt that waits is granted before a later one, and what it holds is then its own."""
    owner = FakeOwner(4, P)
    first, second = owner.session(), owner.session()
    taken = first.lease(4, 4).blocks
    (waits,) = second.acquire([Chain(tokens=[1, 1], table_block_count=2)], wait_s=1.0)
    assert waits.grant is not None
    (behind,) = first.acquire([Chain(tokens=[2, 2], table_block_count=1)])
    assert behind.refusal is not None
    first.release(taken[:2])
    granted = waits.grant.poll()
    assert granted is not None
    assert [*granted.held] == [*BlockRun.of(())]
    assert len(granted.leased) == 2


def test_who_waits_for_room_holds_no_spare_blocks() -> None:
    """[E11] They may be what is missing."""
    owner = FakeOwner(8, P)
    other, engine = owner.session(), Engine(owner)
    assert engine.held.grow(1, ahead=3)
    hog = other.lease(3, 3).blocks
    assert not engine.admit("waits", [*range(2 * P * 3)])
    assert engine.calls.held() == []
    other.release(hog)
    assert engine.admit("waits", [*range(2 * P * 3)])


def test_a_promise_ends_with_its_take_or_its_refusal() -> None:
    """[E14] What is spare then is anybody's."""
    engine = Engine(FakeOwner(8, P))
    assert engine.held.grow(2, ahead=3)
    assert len(engine.held.take(2)) == 2
    engine.calls.release(engine.held.recall(2))
    assert engine.held.spare_count == 1
    assert not engine.held.grow(9)
    engine.calls.release(engine.held.recall(100))
    assert engine.held.spare_count == 0


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_a_block_that_comes_again_is_not_published_any_more(is_forgotten: bool) -> None:
    """[E12] It went back, by itself or with the epoch: when its next user ends it is spare."""
    engine = Engine(FakeOwner(1, P))
    assert engine.held.grow(1)
    table = engine.held.take(1)
    engine.held.publish(table, 0, 1, tokens=[1] * P)
    if is_forgotten:
        engine.held.forget()
        engine.calls.release(engine.calls.owner.run(engine.calls.held()))
    else:
        engine.held.drop(table)
    assert engine.held.grow(1)
    again = engine.held.take(1)
    assert again == table
    engine.held.drop(again)
    assert engine.held.spare_count == 1


def test_the_tail_of_a_request_goes_back_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """[E12] The owner evicts first what is named first, and what is behind it could not be reached."""
    engine, released = Engine(FakeOwner(4, P)), []
    assert engine.held.grow(3)
    table = engine.held.take(3)
    engine.held.publish(table, 0, 3, tokens=[1] * (3 * P))
    monkeypatch.setattr(engine.calls, "release", lambda run: released.extend(run.block_ids.tolist()))
    engine.held.drop(table)
    assert released == table[::-1]
