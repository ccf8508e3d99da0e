"""The service process is killed after every store it makes, and nothing is lost, wrong, reused or leaked."""

import os

import pytest
from actions import ACTIONS, config
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from killing import Killing, walk

from kvharbor.pool import POLICIES

EXAMPLES = int(os.environ.get("KVHARBOR_MODEL_EXAMPLES", "60"))


class KilledMachine(RuleBasedStateMachine):
    """[G1], [G3], [G7], [L1] to [L12]: a kill after each store of each step, then a recovery and a resume."""

    @initialize(block_count=st.sampled_from([24, 12]), slice_blocks=st.integers(1, 2), policy=st.sampled_from(POLICIES))
    def start(self, block_count: int, slice_blocks: int, policy: str) -> None:
        self.world = Killing(config(block_count, slice_blocks, 0, policy))

    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        ready = [action for action in ACTIONS if action.ready(self.world) for _ in range(action.weight)]
        action = data.draw(st.sampled_from(ready))
        chosen = {name: data.draw(st.sampled_from(options), name) for name, options in action.options.items()}
        getattr(self.world, action.name)(**chosen)
        self.world.check_kills()


KilledMachine.TestCase.settings = settings(
    max_examples=max(EXAMPLES // 4, 1),
    stateful_step_count=20,
    suppress_health_check=list(HealthCheck),
)
# A failure needs time to be made small.
TestPoolKilled = pytest.mark.timeout(600)(pytest.mark.slow(KilledMachine.TestCase))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(max(EXAMPLES // 10, 1)))
def test_a_kill_at_any_instant_of_a_long_walk_loses_nothing(seed: int) -> None:
    """As above, for states that no short example reaches."""
    assert walk(seed, steps=60).kill_count > 50
