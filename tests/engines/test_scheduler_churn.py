"""Two of vLLM's schedulers on a pool of 40 blocks: nothing is lost, leaked, or read before it is written."""

import pytest

from engines.churn import Churn

pytestmark = pytest.mark.timeout(300)

KINDS = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


@KINDS
@pytest.mark.parametrize("seed", [1, 2])
def test_random_events_leak_nothing_and_change_no_answer(asynchronous: bool, seed: int) -> None:
    """1,500 events with evictions, preemptions, aborts and duplicates, then all is answered and given back."""
    churn = Churn(asynchronous=asynchronous, seed=seed)
    churn.run()
    churn.check()
    counters = churn.owner.counters
    assert counters["evicted"] > 100
    assert counters["hits"] > 50
    assert counters["granted_later"] > 10
    assert sum(engine.preempted_count for engine in churn.engines) > 0


@KINDS
def test_requests_of_higher_priority_take_the_place_of_others(asynchronous: bool) -> None:
    """Those that are preempted in the very step that they were scheduled in publish nothing of it."""
    churn = Churn(asynchronous=asynchronous, seed=3, policy="priority")
    churn.run()
    churn.check()


@KINDS
def test_salts_never_cross(asynchronous: bool) -> None:
    """The KV of equal tokens differs by salt here, so that a hit across salts would be seen."""
    churn = Churn(asynchronous=asynchronous, seed=4)
    churn.run(salts=3)
    churn.check()


@KINDS
@pytest.mark.parametrize("seed", [5, 6, 7])
def test_nothing_is_a_hit_across_a_reset(asynchronous: bool, seed: int) -> None:
    """An engine takes other weights now and then, with requests under way, and resets its prefix cache."""
    churn = Churn(asynchronous=asynchronous, seed=seed)
    churn.run(resets=True)
    churn.check()
