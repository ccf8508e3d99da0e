"""An engine that is paused, for as long as its user likes: it holds nothing that only those need who wait."""

import pytest
from vllm.v1.core.sched.interface import PauseState

from engines.churn import Churn
from engines.scheduler_configs import BLOCK_TOKENS

pytestmark = pytest.mark.timeout(300)

KINDS = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
PAUSES = pytest.mark.parametrize("pause", [PauseState.PAUSED_ALL, PauseState.PAUSED_NEW])
LONG = 13 * BLOCK_TOKENS


def long_prompt(number: int) -> list[int]:
    return [number, *range(LONG - 1)]


@KINDS
@PAUSES
def test_who_waits_for_room_is_granted_none_in_a_pause(asynchronous: bool, pause: PauseState) -> None:
    """Nobody would look at the grant, and another engine would wait behind it until the pause ends."""
    churn = Churn(asynchronous=asynchronous, seed=1, block_count=17)
    first, second = churn.engines
    churn.ask("running", second, long_prompt(1), 4)
    second.step()
    churn.ask("waiting", first, long_prompt(2), 4)
    first.step()
    assert churn.owner.queue
    first.scheduler.set_pause_state(pause)
    churn.ask("next", second, long_prompt(3), 4)
    for _ in range(60):
        second.step()
    assert len(second.answers["next"]) == 4
    assert not first.calls.direct
    first.scheduler.set_pause_state(PauseState.UNPAUSED)
    churn.drain()
    churn.check()


@KINDS
@PAUSES
def test_a_pause_gives_back_what_is_reserved_and_spare(asynchronous: bool, pause: PauseState) -> None:
    """A request that has its blocks and has not entered yet gives them up, and gets them anew afterwards."""
    churn = Churn(asynchronous=asynchronous, seed=2)
    engine, _ = churn.engines
    churn.ask("running", engine, long_prompt(1)[:40], 30)
    engine.step()
    churn.ask("reserved", engine, long_prompt(2), 4)
    engine.scheduler._admission.prepare(engine.scheduler)
    assert engine.scheduler._admission.lacking
    engine.scheduler.set_pause_state(pause)
    assert not engine.scheduler._room.free_count
    (used,) = engine.scheduler.kv_cache_manager.get_block_ids("running")
    assert {*engine.scheduler._pool.held} == {*used}
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    churn.drain()
    churn.check()
