"""Recalls that come in the very moment in which blocks do."""

import pytest

from fake_blocks import FakeCalls, FakeOwner
from kvharbor.client import BlockRun, Namespace
from kvharbor.engines.request_blocks import RequestBlocks


@pytest.mark.parametrize("spare_count", [0, 2])
def test_blocks_that_are_recalled_as_soon_as_they_have_come_stay_for_who_asked(
    monkeypatch: pytest.MonkeyPatch, spare_count: int
) -> None:
    """The stream brings the recall right behind the lease: its thread may be first to look at the spare blocks."""
    calls: FakeCalls = FakeOwner(20, 2).session()
    held = RequestBlocks(calls, Namespace())  # type: ignore[arg-type]
    held.keep(calls.lease(spare_count, spare_count).blocks)
    keep = held.keep

    def kept(leased: BlockRun) -> None:
        keep(leased)
        calls.release(held.recall(100))

    monkeypatch.setattr(held, "keep", kept)
    assert held.grow(4, ahead=3)
    assert held.spare_count == 4
    assert len(held.take(4)) == 4
    calls.release(held.recall(100))
    assert len(calls.held()) == 4
