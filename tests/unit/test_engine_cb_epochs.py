"""Continuous batching when the epoch ends in the middle of a call, wherever that is in a step."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from batching_here import BLOCK_TOKENS, PROMPTS, alone, finished, greedy
from fake_blocks import FakeOwner
from kvharbor.client import EpochEnded
from kvharbor.engines.transformers_cb import continuous_batching, layout_for
from kvharbor.gpumem import BlockViews, HostArena
from tiny_models import decoder

NEW_TOKENS = 24
MODEL = decoder("Llama")
EXPECTED: list[list[int]] = []


class EndingPool:
    """A pool on an owner in memory, whose epoch ends in one of the engine's calls."""

    def __init__(self, arena: HostArena, descriptor: Any) -> None:
        self.descriptor = descriptor
        self.block_tokens = BLOCK_TOKENS
        self.name = "p"
        self.link = SimpleNamespace(options=SimpleNamespace(on_epoch=print))
        self.mapping = arena.map()
        self.views = BlockViews(self.mapping, descriptor)
        self.owners = [self._owner()]
        self.blocks = self.owners[0].session()

    def end_epoch_in(self, name: str, nth: int) -> None:
        """Has the nth call of that name find that the epoch has ended."""
        call, count = getattr(self.blocks, name), iter(range(1, nth))

        def ends(*arguments: Any, **keywords: Any) -> Any:
            if next(count, None) is not None:
                return call(*arguments, **keywords)
            setattr(self.blocks, name, call)
            self.owners.append(self._owner())
            self.blocks.owner = self.owners[-1]
            raise EpochEnded("the epoch has ended")

        setattr(self.blocks, name, ends)

    def _owner(self) -> FakeOwner:
        return FakeOwner(self.descriptor.block_count - 2, BLOCK_TOKENS)


@pytest.fixture
def pool_of() -> Iterator[Callable[[int], EndingPool]]:
    """Makes a pool of so many blocks."""
    made: list[tuple[EndingPool, HostArena]] = []

    def make(block_count: int) -> EndingPool:
        descriptor = layout_for(MODEL, BLOCK_TOKENS).descriptor(block_count)
        arena = HostArena.create(descriptor.size_bytes)
        made.append((EndingPool(arena, descriptor), arena))
        return made[-1][0]

    yield make
    for pool, arena in made:
        pool.views.close()
        pool.mapping.close()
        arena.close()


@pytest.mark.parametrize("answer_count", [1, 2], ids=["one", "forked"])
@pytest.mark.parametrize(
    ("name", "nth"),
    [("acquire", 1), ("acquire", 2), ("acquire", 4), ("lease", 1), ("commit", 1), ("commit", 3), ("release", 1)],
)
def test_requests_begin_again_and_say_the_same(
    name: str, nth: int, answer_count: int, pool_of: Callable[[int], EndingPool]
) -> None:
    """In the middle of scheduling, of publishing, of giving back: each request is there once, and nothing is left."""
    if not EXPECTED:
        EXPECTED.extend([alone(MODEL, prompt, NEW_TOKENS) for prompt in PROMPTS])  # all or, after a timeout, none
    pool: Any = pool_of(40)
    pool.end_epoch_in(name, nth)
    with continuous_batching(MODEL, pool, greedy(answer_count)) as engine:
        first = engine.add_requests([[*prompt] for prompt in PROMPTS], max_new_tokens=NEW_TOKENS)
        names = [*first, *(f"{request_id}__child#0" for request_id in first if answer_count == 2)]
        outcomes = finished(engine, names)
    assert [outcome.error for outcome in outcomes] == [None] * len(names)
    assert [outcome.generated_tokens for outcome in outcomes] == EXPECTED * answer_count
    assert len(pool.owners) == 2
    assert pool.blocks.held() == []
    del engine
