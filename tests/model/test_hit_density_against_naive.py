"""HitDensity in the real pool evicts, block by block, what its naive reference would."""

import os
import random
from collections.abc import Sequence

import pytest
from actions import ACTIONS, config
from calls import commit, encode, new_pool, release, span
from crossing import Crossing
from naive_hit_density import Compared

from kvharbor.pool import ExpectedReuse, Hints, Pool, Prompt, hit_density
from kvharbor.pool.steps import finish

SEEDS = range(int(os.environ.get("KVHARBOR_MODEL_EXAMPLES", "60")) // 6)

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few blocks wait in one step, so that pools of some blocks show what large ones do."""
    monkeypatch.setattr(hit_density, "_PATIENCE", 3)


class Hinting(Compared):
    """Whoever publishes gives hints, by the content."""

    def publish_many(self, blocks: Sequence[int], digests: Sequence[bytes], hint_class: int = 0) -> None:
        super().publish_many(blocks, digests, digests[0][0] % 4)


def compare(pool: Pool, kind: type[Compared] = Compared) -> Compared:
    """Puts both policies into an empty pool."""
    state = pool._state
    both = kind(state.config.block_count, state.tree)
    state.blocks.evictable = both
    return both


HINTS = [Hints(), Hints(priority=1), Hints(retention_s=60), Hints(expected_reuse=ExpectedReuse.NONE)]


@pytest.mark.parametrize("hints", [HINTS[:1], HINTS], ids=["plain", "hints"])
@pytest.mark.parametrize("seed", SEEDS)
def test_conversations_and_scans(seed: int, hints: list[Hints]) -> None:
    """Trees with long stems and many leaves, some asked for again and again, through some pools' worth of time."""
    chance = random.Random(seed)
    block_count = chance.choice([16, 24, 40])
    pool = new_pool(block_count, slice_blocks=chance.choice([4, 512]), policy="auto")
    both = compare(pool)
    prompts = [span(1, 4 * chance.randint(1, 8))]
    for number in range(1, 700):
        prompt = prompts[min(int(chance.expovariate(0.2)), len(prompts) - 1)]
        if chance.random() < 0.6:
            kept = prompt[: 4 * chance.randint(0, len(prompt) // 4)]
            prompt = [*kept, *span(100 * number, 100 * number + 4 * chance.randint(1, 5) - 1)][: 4 * 15]
            prompts.insert(0, prompt)
        view = finish(pool.allocate(1, Prompt(encode(prompt), hints=chance.choice(hints))))
        commit(pool, view, len(prompt))
        release(pool, view)
        if not number % 50:
            pool.check_invariants()
    assert both.victim_count > 200
    assert both.ranked_count > 100
    assert both.wait_count


@pytest.mark.parametrize("kind", [Compared, Hinting])
@pytest.mark.parametrize("seed", SEEDS)
def test_everything_that_may_happen(seed: int, kind: type[Compared]) -> None:
    """Warm pins, shadows, evictions by hand, lost sessions: whatever a pool does, slice by slice."""
    chance = random.Random(seed)
    world = Crossing(config(chance.choice([24, 12]), chance.choice([1, 2]), 0, "auto"))
    both = compare(world.pool, kind)
    for _ in range(1600):
        ready = [action for action in ACTIONS if action.ready(world)]
        action = chance.choices(ready, [one.weight for one in ready])[0]
        chosen = {name: chance.choice(options) for name, options in action.options.items()}
        getattr(world, action.name)(**chosen)
    world.end_all()
    assert both.victim_count > 20
