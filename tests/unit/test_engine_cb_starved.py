"""Continuous batching whose requests cannot grow: who gives way, who goes on, and who waits for whom. [E15]"""

from collections.abc import Callable
from typing import Any

import pytest
from transformers.generation.continuous_batching.cache_allocators import FULL_ATTENTION

from batching_here import BLOCK_TOKENS, OTHER, PROMPTS, answers, finished, greedy
from kvharbor.engines.transformers_cb import PooledManager, continuous_batching
from tiny_models import decoder
from unit.test_engine_cb_epochs import EndingPool
from unit.test_engine_cb_epochs import pool_of as pool_of
from waiting import until

NEW_TOKENS = 20


def computed_count(pool: Any, *prompts: list[int]) -> int:
    """Asks an engine for all of these before its first step; returns the prompt tokens of what it has admitted."""
    engine = PooledManager(decoder("Llama"), pool, greedy())
    names = [name for prompt in prompts for name in engine.add_requests([prompt], max_new_tokens=NEW_TOKENS)]
    engine.start()
    try:
        outcomes = finished(engine, names)
    finally:
        engine.stop(hard_stop=True)
    assert [outcome.error for outcome in outcomes] == [None] * len(prompts)
    return engine.reuse.prompt_tokens


def test_of_two_that_cannot_grow_one_gives_way(pool_of: Callable[[int], EndingPool]) -> None:
    """Both have two blocks, and need their third one in the same step."""
    pool = pool_of(12)
    pool.owners[0].session().lease(6, 6)
    again = computed_count(pool, OTHER, OTHER[::-1]) - 2 * len(OTHER)
    assert len(OTHER) < again < 2 * len(OTHER)


def test_one_that_cannot_grow_alone_gives_way_to_others(
    pool_of: Callable[[int], EndingPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lets go of all that it has, and is admitted anew where another engine has let go."""
    pool: Any = pool_of(12)
    owner, acquire = pool.owners[0], pool.blocks.acquire
    other = owner.session()
    room = other.lease(8, 8).blocks
    held: list[int] = []

    def acquiring(*arguments: Any, **keywords: Any) -> Any:
        held.append(len(pool.blocks.held()))
        acquired = acquire(*arguments, **keywords)
        if owner.waiting:
            other.release(room)
        return acquired

    monkeypatch.setattr(pool.blocks, "acquire", acquiring)
    assert computed_count(pool, OTHER) == len(OTHER) + 2 * BLOCK_TOKENS + 1
    assert held[:2] == [0, 0]


def test_who_gave_way_is_admitted_when_nobody_runs(pool_of: Callable[[int], EndingPool]) -> None:
    """transformers admits nobody then until one has finished, and the other one gives way as well."""
    pool: Any = pool_of(12)
    other = pool.owners[0].session()
    room = other.lease(6, 6).blocks
    engine = PooledManager(decoder("Llama"), pool, greedy())
    names = [*engine.add_requests([OTHER], 60), *engine.add_requests([OTHER[::-1]], NEW_TOKENS)]
    engine.start()
    try:
        assert finished(engine, names[1:])[0].error is None
        other.release(room)
        assert finished(engine, names[:1])[0].error is None
    finally:
        engine.stop(hard_stop=True)


def test_those_that_could_go_on_are_counted(pool_of: Callable[[int], EndingPool]) -> None:
    """With what has been given up since, spare or cached by now, and no further than that goes."""
    pool: Any = pool_of(12)
    with continuous_batching(decoder("Llama"), pool, greedy()) as engine:
        answers(engine, PROMPTS, 5)
        cache: Any = until(lambda: engine.batch_processor).cache  # type: ignore[union-attr]
    assert cache.held.returned_count
    cache.evict_cached_blocks()
    assert cache.held.grow(3)
    needed = [{FULL_ATTENTION: count} for count in (1, 2, 1, 1)]
    assert cache.count_storable_requests(needed) == 2
    cache.held.returned_count += 1
    assert cache.count_storable_requests(needed) == 3
    assert cache.count_storable_requests(needed[:1]) == 1
    cache.held.give_back_spare()


def test_who_runs_does_not_give_way_to_who_waits(
    pool_of: Callable[[int], EndingPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where that has just been granted the room that is missing: it waits anew."""
    pool: Any = pool_of(12)
    owner, lease = pool.owners[0], pool.blocks.lease
    other = owner.session()
    room = other.lease(8, 8).blocks  # all but the two that the first needs to begin

    def leasing(*arguments: Any, **keywords: Any) -> Any:
        if owner.waiting:
            other.release(room[:7])
            assert not owner.waiting
        return lease(*arguments, **keywords)

    monkeypatch.setattr(pool.blocks, "lease", leasing)
    assert computed_count(pool, OTHER, PROMPTS[0]) == len(OTHER) + len(PROMPTS[0]), "one has begun again"
