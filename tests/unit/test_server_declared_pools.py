"""How long a start waits for memory that a declared pool lacks, and what it says meanwhile."""

from typing import Any

import pytest

from jumping_loop import run_jumping
from kvharbor.gpumem import InsufficientMemory
from kvharbor.server.configuration.settings import Settings
from kvharbor.server.errors import StartupError
from kvharbor.server.process import declared_pools
from kvharbor.server.process.declared_pools import make_declared
from kvharbor.server.process.earlier_epoch import LETTING_GO_S, NEWS_S, EarlierEpoch

SHORT = InsufficientMemory(100, available_bytes=10, limited_by="device GPU-1")
HELD = SHORT.beside(90, "17, 18")
PLANE = {"name": "k", "layer_count": 1, "data_type": "float32", "head_count": 1, "head_dim": 16}
POOL = {"size": "1MiB", "layout": {"model": "m", "block_tokens": 16, "planes": [PLANE]}}


class FullPools:
    """Refuses every pool."""

    def __init__(self) -> None:
        self.asked_count = 0

    async def declare(self, *_: object) -> tuple[Any, bool]:
        self.asked_count += 1
        raise SHORT


@pytest.mark.parametrize(
    ("earlier", "refused", "patience_s"),
    [
        (EarlierEpoch("host", "", ()), SHORT, 0.0),
        (EarlierEpoch("host", "killed", (7,)), SHORT, 0.0),
        (EarlierEpoch("host", "", ()), HELD, LETTING_GO_S),
        (EarlierEpoch("cuda_ipc", "", ()), SHORT, NEWS_S),
        (EarlierEpoch("cuda_ipc", "supervisor", ()), SHORT, LETTING_GO_S),
        (EarlierEpoch("cuda_vmm", "", (7,)), SHORT, LETTING_GO_S),
    ],
)
def test_what_is_worth_waiting_for(earlier: EarlierEpoch, refused: InsufficientMemory, patience_s: float) -> None:
    """The host shows whether anybody maps old memory; of a device only those tell who come back."""
    assert earlier.patience_s(refused) == patience_s


def test_who_may_have_the_memory_is_said() -> None:
    """By pid: on the host those that map it, on a device those that have been told to let go."""
    assert EarlierEpoch("host", "", ()).holders(HELD) == {"held_bytes": 90, "held_by": "17, 18"}
    assert EarlierEpoch("cuda_ipc", "", {9, 7}).holders(SHORT) == {"told_to_let_go": "7, 9"}


@pytest.mark.parametrize(("arena", "after", "asked_count"), [("host", "", 1), ("cuda_ipc", "killed", 4)])
def test_the_wait_has_an_end(arena: str, after: str, asked_count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it is the refusal that it would have been at once."""
    monkeypatch.setattr(declared_pools, "PAUSE_S", LETTING_GO_S / 2.5)
    pools: Any = FullPools()
    settings = Settings.model_validate({"memory": "8MiB", "pools": {"p": POOL}})

    async def start() -> None:
        await make_declared(pools, settings, EarlierEpoch(arena, after, ()))

    with pytest.raises(StartupError, match=r"setting pools\.p: needs 100 bytes"):
        run_jumping(start)
    assert pools.asked_count == asked_count
