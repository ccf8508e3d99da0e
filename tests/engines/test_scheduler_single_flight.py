"""What another engine is computing is waited for, and computed once."""

from typing import Any

import pytest

from engines.churn import Churn
from engines.fake_block_calls import IDLE
from kvharbor.client import Acquired, Chain, Pending
from kvharbor.engines.vllm import admission, postponed

pytestmark = pytest.mark.timeout(300)

KINDS = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


@pytest.fixture(autouse=True)
def asks_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who stands back does: to the service here time passes by calls."""
    monkeypatch.setattr(admission, "STAND_BACK_S", 0.0)
    monkeypatch.setattr(postponed, "PAUSE_PER_CALL", 0)


def told(*, asynchronous: bool, **options: Any) -> Churn:
    """Returns two engines that are told what the other computes."""
    churn = Churn(asynchronous=asynchronous, seed=1, **options)
    for engine in churn.engines:
        engine.calls.tells_pending = True
    return churn


@KINDS
def test_a_prompt_that_another_engine_computes_is_computed_once(asynchronous: bool) -> None:
    """The second engine holds nothing meanwhile, goes on with others, and then finds all of it."""
    churn = told(asynchronous=asynchronous)
    first, second = churn.engines
    tokens = [*range(246)]
    churn.ask("computes", first, tokens, 4)
    first.step()
    churn.ask("waits", second, tokens, 4)
    churn.ask("goes on", second, [*range(100, 140)], 4)
    while "goes on" not in second.cached:
        second.step()
    assert "waits" not in second.cached
    while "waits" not in second.cached:
        first.step()
        second.step()
    assert not second.scheduler._admission.is_busy
    churn.drain()
    churn.check()
    assert second.cached["waits"] == 240


@KINDS
def test_those_who_stand_back_keep_nobody_out_of_a_step(asynchronous: bool) -> None:
    """However many they are, and though each would fill one."""
    churn = told(asynchronous=asynchronous)
    engine = churn.engines[1]
    for number in range(6):
        churn.ask(f"waits{number}", engine, [number] * 100, 4)
    computed = {engine.scheduler.requests[f"waits{number}"].block_hashes[0] for number in range(6)}
    churn.ask("goes on", engine, [*range(100, 140)], 4)
    calls: Any = engine.calls
    try_chain = calls.try_chain

    def others_compute(chain: Chain) -> Acquired:
        stands_back = chain.unless_pending and chain.keys[:32] in computed
        return Acquired(pending=Pending(96, "another", 0.0), stands_back=True) if stands_back else try_chain(chain)

    calls.try_chain = others_compute
    for _ in range(3):
        engine.step()
    assert set(engine.cached) == {"goes on"}
    calls.try_chain = try_chain
    churn.drain()
    churn.check()


@KINDS
def test_a_step_that_lasts_is_waited_for(asynchronous: bool) -> None:
    """[E17] Until it is over, however long it takes, and though nothing is committed meanwhile."""
    churn = told(asynchronous=asynchronous)
    first, second = churn.engines
    tokens = [*range(246)]
    churn.ask("computes", first, tokens, 4)
    first.schedule()
    churn.ask("waits", second, tokens, 4)
    for _ in range(2 * IDLE):
        second.step()
    assert "waits" not in second.cached
    assert second.calls.calls["acquire"] > IDLE
    churn.drain()
    churn.check()
    assert second.cached["waits"] == 240
    assert not first.calls.computing.is_under_way


@KINDS
def test_a_step_is_over_when_it_was_taken_in(asynchronous: bool) -> None:
    """[E17] And begins when it is scheduled, the next one of two too; one without a request is none."""
    churn = told(asynchronous=asynchronous)
    first, second = churn.engines
    computing = first.calls.computing
    churn.ask("computes", first, [*range(246)], 4)
    first.schedule()
    assert computing.is_under_way
    if asynchronous:
        first.schedule()
        first.update()
        assert computing.is_under_way
    first.update()
    assert not computing.is_under_way
    churn.ask("runs", second, [*range(300, 546)], 4)
    churn.ask("waits", first, [*range(300, 546)], 4)
    first.abort("computes")
    second.schedule()
    first.schedule()
    assert not computing.is_under_way
    churn.aborted.add("computes")
    churn.drain()
    churn.check()


@KINDS
def test_who_waits_goes_on_when_the_other_engine_is_gone(asynchronous: bool) -> None:
    """Nothing more is said to be under way then."""
    churn = told(asynchronous=asynchronous)
    first, second = churn.engines
    tokens = [*range(246)]
    churn.ask("computes", first, tokens, 4)
    first.step()
    churn.ask("waits", second, tokens, 4)
    for _ in range(3):
        second.step()
    assert "waits" not in second.cached
    churn.engines.remove(first)
    churn.owner.watchers.clear()
    churn.asked.pop("computes")
    first.calls.close()
    churn.drain()
    churn.check()
    assert second.cached["waits"] == 64


@KINDS
def test_churn_of_engines_that_wait_for_each_other(asynchronous: bool) -> None:
    """Nobody waits for ever."""
    churn = told(asynchronous=asynchronous)
    churn.run()
    churn.check()
