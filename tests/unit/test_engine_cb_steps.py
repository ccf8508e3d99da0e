"""Steps of continuous batching: what others know of one that is under way, and what is left when all have run."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators import FULL_ATTENTION

from batching_here import DEADLINE_S, OTHER, PROMPTS, answers, finished, greedy
from fake_computing import FakeComputing
from kvharbor.engines.transformers_cb import continuous_batching
from tiny_models import decoder
from unit.test_engine_cb_abandoned import Halting
from unit.test_engine_cb_epochs import EndingPool
from unit.test_engine_cb_epochs import pool_of as pool_of
from waiting import until


def test_a_step_is_known_until_it_is_over(pool_of: Callable[[int], EndingPool]) -> None:
    """[E17] The service is told, and whoever ends the epoch waits for it."""
    pool: Any = pool_of(40)
    halting = Halting(0)
    with continuous_batching(halting.model, pool, greedy()) as engine:
        asked = engine.add_requests([[*PROMPTS[0]]], max_new_tokens=5)
        assert halting.entered.wait(DEADLINE_S)
        waiter = threading.Thread(target=engine._gate.wait_for_end)
        try:
            assert pool.blocks.computing.is_under_way
            waiter.start()
            until(lambda: engine._gate._waiting == 1)
        finally:
            halting.goes_on.set()
        waiter.join()
        finished(engine, asked)
        until(lambda: not pool.blocks.computing.is_under_way)


def test_no_step_begins_in_an_epoch_that_has_ended(pool_of: Callable[[int], EndingPool]) -> None:
    """Not even one that was scheduled before: its blocks are others' by now."""
    pool: Any = pool_of(40)
    model: Any = decoder("Llama")
    seen: list[bool] = []

    class Ending(FakeComputing):
        def begin(self) -> None:
            super().begin()
            if not seen:
                held.epoch_ended = True
                seen.append(True)

    pool.blocks.computing = Ending()
    with continuous_batching(model, pool, greedy()) as engine:
        until(lambda: engine.batch_processor is not None)
        held = engine.batch_processor.cache.held  # type: ignore[union-attr]
        model.register_forward_pre_hook(lambda *_: seen.append(held.epoch_ended))
        answers(engine, PROMPTS[:1], 5)
    assert seen[0]
    assert not any(seen[1:])


def test_of_requests_that_have_ended_nothing_is_kept(pool_of: Callable[[int], EndingPool]) -> None:
    """[E14] Neither spare blocks nor their names: an engine has any number of requests."""
    pool: Any = pool_of(40)
    with continuous_batching(decoder("Llama"), pool, greedy()) as engine:
        answers(engine, PROMPTS, 5)
        assert engine.batch_processor is not None
        cache = engine.batch_processor.cache
        until(lambda: not pool.blocks.held())
        assert not cache._allocator._published_counts
        assert not cache.admissions._announced.chains
        assert not cache.admissions._standing_back


def test_who_waits_for_room_begins_again_in_the_next_epoch(pool_of: Callable[[int], EndingPool]) -> None:
    """Nobody would tell it that it is its turn in the queue of before."""
    pool: Any = pool_of(12)
    pool.end_epoch_in("lease", 1)
    with continuous_batching(decoder("Llama"), pool, greedy()) as engine:
        asked = engine.add_requests([[*PROMPTS[0]], [*PROMPTS[3]]], max_new_tokens=20)
        assert [outcome.error for outcome in finished(engine, asked)] == [None, None]
    assert len(pool.owners) == 2


def test_forks_are_copied_in_a_step(pool_of: Callable[[int], EndingPool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever ends the epoch waits for it too: it writes to blocks that are others' then."""
    pool: Any = pool_of(40)
    copy, seen = PagedAttentionCache.perform_cache_copy, list[bool]()

    def copying(cache: Any, blocks: Any) -> None:
        seen.append(cache.gate._stepping)
        copy(cache, blocks)

    monkeypatch.setattr(PagedAttentionCache, "perform_cache_copy", copying)
    with continuous_batching(decoder("Llama"), pool, greedy(2)) as engine:
        (name,) = engine.add_requests([[*OTHER]], max_new_tokens=3)
        finished(engine, [name, f"{name}__child#0"])
        assert engine.reuse.prompt_tokens == len(OTHER), "the fork is computed from the beginning"
    assert seen == [True]


def test_nothing_is_copied_in_an_epoch_that_has_ended(pool_of: Callable[[int], EndingPool]) -> None:
    """Of forks, once what they were leased is others'."""
    pool: Any = pool_of(12)
    pages = pool.views.torch("v", 1)
    pages[2], pages[3] = 1.0, 2.0
    with continuous_batching(decoder("Llama"), pool, greedy()) as engine:
        cache = until(lambda: engine.batch_processor).cache  # type: ignore[union-attr]
    for is_over in (True, False):
        cache.held.epoch_ended = is_over
        cache.perform_cache_copy({FULL_ATTENTION: ([2], [3])})
        assert bool((pages[2] == pages[3]).all()) == (not is_over)
