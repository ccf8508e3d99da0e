"""The parts of the vLLM engine that need no vLLM: its memory, its weights' name, and its way into a session."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from kvharbor.engines.vllm import ContractBroken, PluginIncomplete, Settings
from kvharbor.engines.vllm.identity import common_identity, weights_identity
from kvharbor.engines.vllm.memory import PoolAllocation
from kvharbor.engines.vllm.session import STAMP, Attachment, Membership, Stamp


def memory() -> torch.Tensor:
    return torch.arange(64, dtype=torch.uint8).view(torch.int8)


def test_the_one_allocation_is_the_pools_memory_as_it_is() -> None:
    """Nothing is set to zero, other allocations go their way, and views of it count as inside."""
    pool = memory()
    allocation = PoolAllocation(pool)
    with allocation:
        other = torch.zeros(3, dtype=torch.float32)
        made = torch.zeros(64, dtype=torch.int8, device=torch.device("cpu"))
    assert made.data_ptr() == pool.data_ptr()
    assert made.tolist() == memory().tolist()
    assert other.tolist() == [0, 0, 0]
    allocation.require_answered([made.as_strided((2, 16), (32, 1), 16), made[32:]])


@pytest.mark.parametrize("size", [63, 65, (64, 1)])
def test_an_allocation_of_another_size_is_refused(size: Any) -> None:
    """vLLM would put its pages elsewhere."""
    with PoolAllocation(memory()), pytest.raises(ContractBroken):
        torch.zeros(size, dtype=torch.int8)


def test_a_second_allocation_is_refused() -> None:
    """Two caches in one memory would overwrite each other."""
    with PoolAllocation(memory()):
        torch.zeros(64, dtype=torch.int8)
        with pytest.raises(ContractBroken):
            torch.zeros(64, dtype=torch.int8)


def test_a_cache_elsewhere_is_refused() -> None:
    """Also where none was asked for at all."""
    allocation = PoolAllocation(memory())
    with pytest.raises(ContractBroken):
        allocation.require_answered([])
    with allocation:
        made = torch.zeros(64, dtype=torch.int8)
    with pytest.raises(ContractBroken):
        allocation.require_answered([made, memory()])
    with pytest.raises(ContractBroken):
        allocation.require_answered([])


class Config:
    model_type = "tiny"

    def __init__(self, **values: object) -> None:
        self.values = values

    def to_dict(self) -> dict[str, object]:
        return self.values


def test_models_have_one_name_only_if_config_and_weights_are_equal() -> None:
    """Where they came from does not matter."""
    model, same, other = (torch.nn.Linear(4, 4) for _ in range(3))
    same.load_state_dict(model.state_dict())
    names = [
        weights_identity(each, config)
        for each, config in (
            (model, Config(layers=1, _name_or_path="here")),
            (same, Config(layers=1, _name_or_path="there")),
            (other, Config(layers=1)),
            (model, Config(layers=2)),
        )
    ]
    assert names[0] == names[1]
    assert len(set(names)) == 3
    assert names[0].startswith("tiny-")


def test_ranks_have_one_name_together() -> None:
    """In order of rank."""
    assert common_identity("tiny-a", ["tiny-a"]) == "tiny-a"
    both = common_identity("tiny-a", ["tiny-a", "tiny-b"])
    assert both == common_identity("tiny-b", ["tiny-a", "tiny-b"])
    assert both not in ("tiny-a", common_identity("tiny-a", ["tiny-b", "tiny-a"]))


def membership() -> Membership:
    attachment = SimpleNamespace(stamp=Stamp("own token", "pool-1"))
    return Membership(Settings(), cast(Attachment, attachment), rank=0)


def test_a_step_of_the_own_session_runs() -> None:
    """A worker in the scheduler's process has nothing to join."""
    member = membership()
    for _ in range(2):
        member.require(SimpleNamespace(**{STAMP: Stamp("own token", "pool-1")}))
    member.close()


def test_a_step_without_a_stamp_does_not_run() -> None:
    """vLLM's own scheduler would use blocks that are other engines'."""
    with pytest.raises(PluginIncomplete):
        membership().require(SimpleNamespace())


def test_a_step_of_another_pool_or_session_does_not_run() -> None:
    """Its blocks are not those that are mapped here."""
    with pytest.raises(ContractBroken):
        membership().require(SimpleNamespace(**{STAMP: Stamp("own token", "pool-2")}))
    member = membership()
    member.require(SimpleNamespace(**{STAMP: Stamp("own token", "pool-1")}))
    with pytest.raises(ContractBroken):
        member.require(SimpleNamespace(**{STAMP: Stamp("another token", "pool-1")}))
    with pytest.raises(PluginIncomplete):
        member.require(SimpleNamespace())
