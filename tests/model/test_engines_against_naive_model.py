"""[U1] [U2] [U3]: whatever happens, each engine is told with what it has reused of whom, as a diary has it."""

from collections import Counter

import pytest
from naive_engines import walk

from kvharbor.pool import engines


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 3, 6, 64])
def test_each_engine_is_told_with_what_it_reuses_of_whom(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences, block calls, evictions, sessions that end, killed processes; with room for few engines or for all."""
    monkeypatch.setattr(engines, "MOST", most)
    worlds = [walk(seed, 300) for seed in range(12)]
    reuses = sum((world.reuses for world in worlds), Counter[str]())
    assert min(reuses["own"], reuses["other"], reuses["earlier"]) > 20
    assert (sum(world.told_together for world in worlds) > 20) == (most < 64)
    assert sum(world.stood_back for world in worlds) > 10
