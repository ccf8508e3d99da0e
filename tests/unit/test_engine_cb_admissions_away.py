"""Prompts of continuous batching whose place in the owner's queue ends with the service's process, call by call."""

from collections.abc import Sequence

import pytest

from kvharbor.client import Acquired, BlockRun, Chain, EpochEnded, Grant, HarborError, PoolExhausted, Unavailable
from unit.test_engine_cb_admissions import PROMPT, TABLE, Owner

HELD = BlockRun.of([(9, 1)])


class AwayOwner(Owner):
    """What asks for nothing to write is not answered while `is_away`."""

    def __init__(self, grant: Grant, *answers: Acquired) -> None:
        super().__init__(Acquired(refusal=PoolExhausted("full"), waiting=True, grant=grant), *answers)
        self.is_away = False
        self.released: list[tuple[int, int]] = []
        assert self.admissions.admit("waits", PROMPT) is None

    def acquire(self, chains: Sequence[Chain], *, wait_s: float = 0.0) -> list[Acquired]:
        if self.is_away and not wait_s:
            raise Unavailable("away")
        return super().acquire(chains, wait_s=wait_s)

    def release(self, blocks: BlockRun) -> None:
        self.released += blocks


@pytest.mark.parametrize("ended", [Unavailable("its process has ended"), EpochEnded("and all with it")])
@pytest.mark.parametrize("whose", [None, "waits"], ids=["for those that run", "cancelled"])
def test_a_wait_that_ended_by_an_error_is_given_up_as_any(ended: HarborError, whose: str | None) -> None:
    """A request that cannot grow has it ended before anybody looks at it: that is no reason to end the engine."""
    grant = Grant(lambda: None)
    owner = AwayOwner(grant, Acquired(leased=TABLE))
    grant.end(ended)
    owner.admissions.cancel(whose)
    assert owner.admissions.admit("waits", PROMPT) is not None


def test_what_was_granted_goes_back_where_it_cannot_be_asked_for_once_more() -> None:
    """[E13] The session has it, also in the service's next process, and nobody would use it."""
    grant = Grant(lambda: None)
    owner = AwayOwner(grant, Acquired(leased=TABLE))
    grant.end(Acquired(held=HELD, leased=TABLE))
    owner.is_away = True
    assert owner.admissions.admit("waits", PROMPT) is None
    assert sorted(owner.released) == sorted([*HELD, *TABLE])
    assert owner.admissions.admit("waits", PROMPT) is not None


@pytest.mark.parametrize("is_away", [False, True])
def test_others_are_told_at_once_of_what_was_granted_and_not_confirmed(is_away: bool) -> None:
    """[E18] It may wait for room for long now, while the engine is at work on something else."""
    grant = Grant(lambda: None)
    owner = AwayOwner(grant, Acquired())
    grant.end(Acquired(held=HELD))
    owner.is_away = is_away
    assert owner.admissions.admit("waits", PROMPT) is None
    assert owner.abandoned == [Chain(tokens=PROMPT[:8])]
