"""Many requests that stand back [W8]: what asking for them again costs, and what they are given at once."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from engines.churn import Churn
from engines.scheduler_world import Engine
from kvharbor.client import Acquired, Chain, Pending, Unavailable
from kvharbor.engines.vllm import admission, candidates, postponed

pytestmark = pytest.mark.timeout(300)

KINDS = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
COUNT = 12


@pytest.fixture
def asks_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "STAND_BACK_S", 0.0)
    monkeypatch.setattr(postponed, "PAUSE_PER_CALL", 0)


def standing_back(*, asynchronous: bool, places: int) -> tuple[Churn, Engine, set[bytes]]:
    """An engine whose requests all stand back, and the first keys of what another one computes."""
    churn = Churn(asynchronous=asynchronous, seed=1, block_count=120)
    engine = churn.engines[0]
    engine.scheduler.max_num_running_reqs = engine.scheduler.max_num_active_reqs = places
    for number in range(COUNT):
        churn.ask(f"r{number}", engine, [number] * 100, 4)
    computed = {request.block_hashes[0] for request in engine.scheduler.requests.values()}
    calls: Any = engine.calls
    try_chain: Callable[[Chain], Acquired] = calls.try_chain

    def others_compute(chain: Chain) -> Acquired:
        stands_back = chain.unless_pending and chain.keys[:32] in computed
        return Acquired(pending=Pending(96, "another", 0.0), stands_back=True) if stands_back else try_chain(chain)

    calls.try_chain = others_compute
    for _ in range(COUNT):
        engine.step()
    assert len(engine.scheduler._admission._postponed) == COUNT
    return churn, engine, computed


@KINDS
@pytest.mark.usefixtures("asks_in_every_step")
def test_they_are_given_blocks_only_where_they_may_run(asynchronous: bool) -> None:
    """E11, E14: when the other engine is gone, those without a place hold nothing, and others get the room."""
    places = 2
    churn, engine, computed = standing_back(asynchronous=asynchronous, places=places)
    computed.clear()
    engine.step()
    assert engine.scheduler.running
    others = churn.engines[1].calls
    others.release(others.lease(100, 100).blocks)
    while engine.busy:
        engine.step()
        assert len(engine.scheduler.running) + len(engine.scheduler._admission._reserved) <= places
    churn.check()


@pytest.mark.usefixtures("asks_in_every_step")
def test_of_those_who_begin_alike_one_is_given_blocks() -> None:
    """The others find what that one has computed."""
    churn, engine, computed = standing_back(asynchronous=False, places=COUNT + 1)
    churn.ask("alike", engine, [0] * 100, 4)
    engine.step()
    assert "alike" in engine.scheduler._admission._postponed
    computed.clear()
    engine.step()
    assert "r0" in engine.cached
    assert "alike" not in engine.scheduler._admission._reserved
    churn.drain()
    churn.check()
    assert engine.cached["alike"] == 64


@KINDS
@pytest.mark.usefixtures("asks_in_every_step")
def test_they_are_not_in_each_others_way(asynchronous: bool) -> None:
    """The last one has become free; with a place for one only, those before it are asked for in turn."""
    churn, engine, computed = standing_back(asynchronous=asynchronous, places=1)
    last = f"r{COUNT - 1}"
    computed.remove(engine.scheduler.requests[last].block_hashes[0])
    for _ in range(2 * COUNT):
        engine.step()
    assert set(engine.cached) == {last}
    computed.clear()
    churn.drain()
    churn.check()


@pytest.mark.usefixtures("asks_in_every_step")
def test_nobody_else_is_asked_for_behind_a_call_that_did_not_give_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that is away is asked once in a step, for who comes as for those that stand back."""
    churn, engine, computed = standing_back(asynchronous=False, places=COUNT + 1)
    churn.ask("comes", engine, [*range(100, 140)], 4)
    sizes: list[int] = []

    def away(chains: Sequence[Chain], **_: Any) -> list[Acquired]:
        sizes.append(len(chains))
        raise Unavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(engine.calls, "acquire", away)
        engine.step()
    assert sizes == [COUNT]
    computed.clear()
    churn.drain()
    churn.check()


@KINDS
def test_a_session_between_two_inputs_has_a_place(asynchronous: bool) -> None:
    """E11: whoever comes cannot enter before it ends, and holds nothing."""
    churn = Churn(asynchronous=asynchronous, seed=1)
    engine = churn.engines[0]
    engine.scheduler.max_num_running_reqs = engine.scheduler.max_num_active_reqs = 1
    churn.ask("session", engine, [*range(40)], 4, resumable=True)
    for _ in range(8):
        engine.step()
    assert engine.scheduler.num_waiting_for_streaming_input
    churn.ask("comes", engine, [*range(100, 140)], 4)
    engine.step()
    assert not engine.scheduler._admission.is_busy
    churn.aborted.add("session")
    engine.abort("session")
    churn.drain()
    churn.check()


@pytest.mark.usefixtures("asks_in_every_step")
def test_a_call_asks_for_as_much_as_a_message_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for more is refused, which would end the engine."""
    monkeypatch.setattr(candidates, "MOST_BLOCKS", 20)
    churn, engine, computed = standing_back(asynchronous=False, places=COUNT)
    calls: Any = engine.calls
    acquire, sizes = calls.acquire, []

    def counting(chains: Sequence[Chain], **more: Any) -> list[Acquired]:
        sizes.append(sum(len(chain.keys) // 32 for chain in chains))
        found: list[Acquired] = acquire(chains, **more)
        return found

    calls.acquire = counting
    engine.step()
    computed.clear()
    churn.drain()
    churn.check()
    assert 6 < max(sizes) <= 20


def test_what_takes_long_is_asked_seldom() -> None:
    """Most of the time is for what runs, however much there is to ask for again."""
    churn, engine, computed = standing_back(asynchronous=False, places=COUNT)
    calls: Any = engine.calls
    acquire, now, count = calls.acquire, 1e6, 0

    def slow(chains: Sequence[Chain], **more: Any) -> list[Acquired]:
        nonlocal now, count
        now += 0.05
        count += 1
        found: list[Acquired] = acquire(chains, **more)
        return found

    calls.acquire = slow
    engine.scheduler._admission._postponed._clock = lambda: now
    end = now + 10.0
    while now < end:
        engine.step()
        now += 0.001
    assert count * 0.05 < 0.1 * 10.0
    del calls.acquire
    computed.clear()
    now += 10.0
    churn.drain()
    churn.check()
