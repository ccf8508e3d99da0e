"""Operations of several sessions run slice by slice, in any order, while every promise is checked after each."""

import os
import random

import pytest
from actions import ACTIONS, config
from crossing import Crossing
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvharbor.pool import POLICIES

EXAMPLES = int(os.environ.get("KVHARBOR_MODEL_EXAMPLES", "60"))


class InterleavedMachine(RuleBasedStateMachine):
    """[G1] to [G5] and [P1] to [P7] between any two slices of several sessions' operations."""

    @initialize(
        block_count=st.sampled_from([24, 12]),
        slice_blocks=st.integers(1, 2),
        min_reuse_tokens=st.sampled_from([0, 0, 4]),
        policy=st.sampled_from(POLICIES),
    )
    def start(self, block_count: int, slice_blocks: int, min_reuse_tokens: int, policy: str) -> None:
        self.world = Crossing(config(block_count, slice_blocks, min_reuse_tokens, policy))

    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        ready = [action for action in ACTIONS if action.ready(self.world) for _ in range(action.weight)]
        action = data.draw(st.sampled_from(ready))
        chosen = {name: data.draw(st.sampled_from(options), name) for name, options in action.options.items()}
        getattr(self.world, action.name)(**chosen)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.end_all()


InterleavedMachine.TestCase.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=60,
    suppress_health_check=list(HealthCheck),
)
# A failure needs time to be made small.
TestPoolInterleaved = pytest.mark.timeout(600)(pytest.mark.slow(InterleavedMachine.TestCase))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(max(EXAMPLES // 10, 1)))
def test_a_long_walk_keeps_every_promise(seed: int) -> None:
    """[G1] to [G5] and [P1] to [P7] hold through 600 steps of chance, for states that no short example reaches."""
    chance = random.Random(seed)
    shape = chance.choice([24, 12]), chance.choice([1, 2]), chance.choice([0, 0, 4])
    world = Crossing(config(*shape, POLICIES[seed % len(POLICIES)]))
    for _ in range(600):
        ready = [action for action in ACTIONS if action.ready(world)]
        action = chance.choices(ready, [one.weight for one in ready])[0]
        chosen = {name: chance.choice(options) for name, options in action.options.items()}
        getattr(world, action.name)(**chosen)
    world.end_all()
