"""What is told of prompts that are not computed any more, and when. [E18]"""

import pytest

from kvharbor.client import Chain
from kvharbor.engines.announced import Announced

CHAIN, OTHER = (Chain(tokens=[number] * 8) for number in range(2))


class Told:
    """Remembers what others were told."""

    def __init__(self) -> None:
        self.told: list[Chain] = []
        self.announced: Announced[str] = Announced(self.told.extend)


@pytest.mark.parametrize(("is_complete", "expected"), [(True, []), (False, [CHAIN])])
def test_a_step_that_goes_on_with_it_is_awaited(is_complete: bool, expected: list[Chain]) -> None:
    """While that is under way nothing is told, and afterwards only where it was not the last."""
    told, step = Told(), object()
    told.announced.add("r", CHAIN)
    told.announced.end("r", step, is_complete=is_complete)
    told.announced.tell([object(), step])
    assert not told.told
    told.announced.tell([object()])
    told.announced.tell()
    assert told.told == expected


def test_what_a_step_under_way_computes_to_its_end_is_not_given_up_by_another_request() -> None:
    """But what it computes a part of is."""
    for is_complete in (True, False):
        told, step = Told(), object()
        for name in ("goes on", "is given up"):
            told.announced.add(name, CHAIN)
        told.announced.end("goes on", step, is_complete=is_complete)
        told.announced.end("is given up")
        told.announced.tell([step])
        assert told.told == ([] if is_complete else [CHAIN])


def test_a_request_that_is_admitted_anew_gives_up_what_it_computed_before() -> None:
    """Where that is another prompt: a preempted one may have grown."""
    told = Told()
    for chain in (CHAIN, CHAIN, OTHER):
        told.announced.add("r", chain)
    told.announced.tell()
    assert told.told == [CHAIN]
    assert told.announced.chains == {"r": OTHER}


def test_all_is_given_up_with_what_is_under_way() -> None:
    """Once."""
    told, step = Told(), object()
    told.announced.add("ended", CHAIN)
    told.announced.end("ended", step, is_complete=True)
    told.announced.add("computes", OTHER)
    told.announced.abandon_all()
    told.announced.abandon_all()
    told.announced.tell()
    assert told.told == [OTHER, CHAIN]


def test_with_the_epoch_all_is_forgotten() -> None:
    """The next one's service was told nothing."""
    told = Told()
    told.announced.add("ended", CHAIN)
    told.announced.end("ended")
    told.announced.add("computes", OTHER)
    told.announced.forget()
    told.announced.abandon_all()
    told.announced.end("computes")
    told.announced.tell()
    assert not told.told
