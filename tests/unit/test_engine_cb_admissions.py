"""Prompts of continuous batching that stand back for what another engine computes, call by call. [W8]"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvharbor.client import Acquired, BlockRun, Chain, Grant, Namespace, Pending, PoolExhausted
from kvharbor.engines.request_blocks import RequestBlocks
from kvharbor.engines.transformers_cb.admissions import MOST_PAUSE_S, STAND_BACK_S, Admissions

PROMPT = list(range(9))
TABLE = BlockRun.of([(1, 1), (2, 1), (3, 1)])
ELSEWHERE = Acquired(pending=Pending(8, "another", 0.0), stands_back=True)


class Owner:
    """Answers each acquire with what is next, and remembers what was asked."""

    def __init__(self, *answers: Acquired) -> None:
        self.answers = [*answers]
        self.asked: list[Chain] = []
        self.abandoned: list[Chain] = []
        self.now = 5.0
        calls: Any = self
        self.admissions = Admissions(calls, RequestBlocks(calls, Namespace()), Namespace(), 4, clock=lambda: self.now)

    def acquire(self, chains: Sequence[Chain], *, wait_s: float = 0.0) -> list[Acquired]:
        (chain,) = chains
        self.asked.append(chain)
        return [self.answers.pop(0)]

    def abandon(self, chains: Sequence[Chain]) -> None:
        self.abandoned += chains

    def release(self, blocks: BlockRun) -> None:
        assert not len(blocks)


def test_who_stands_back_is_asked_for_again_a_little_later() -> None:
    """Others are asked for meanwhile."""
    owner = Owner(ELSEWHERE, Acquired(leased=TABLE), Acquired(leased=TABLE))
    admissions = owner.admissions
    assert admissions.admit("waits", PROMPT) is None
    assert admissions.any_stood_back
    admissions.any_stood_back = False
    owner.now += STAND_BACK_S / 2
    assert admissions.admit("waits", PROMPT) is None
    assert admissions.any_stood_back
    assert len(owner.asked) == 1
    assert admissions.admit("goes on", PROMPT) is not None
    owner.now += STAND_BACK_S
    admissions.any_stood_back = False
    assert admissions.admit("waits", PROMPT) is not None
    assert not admissions.any_stood_back
    assert all((one.table_block_count, one.computes, one.unless_pending) == (3, True, True) for one in owner.asked)


def test_many_who_stand_back_are_asked_for_as_often_as_one() -> None:
    """Each time is a round trip for which the whole step waits."""
    owner = Owner(*[ELSEWHERE] * 1000)
    names = [f"waits {number}" for number in range(50)]
    for _ in range(100):
        for name in names:
            assert owner.admissions.admit(name, PROMPT) is None
        owner.now += STAND_BACK_S
    assert 2 * len(names) < len(owner.asked) < len(names) + 110


def test_nobody_stands_back_for_long_without_being_asked_for() -> None:
    """However many do: what the other engine computes may be what all of them begin with."""
    count = 1000
    owner = Owner(*[ELSEWHERE] * 2 * count, *[Acquired()] * count)
    for _ in range(2):
        for number in range(count):
            assert owner.admissions.admit(f"waits {number}", PROMPT) is None
        owner.now += MOST_PAUSE_S
    for number in range(count):
        assert owner.admissions.admit(f"waits {number}", PROMPT) is not None


def test_who_was_in_line_for_room_may_come_to_stand_back() -> None:
    """It has no place there any more, so that others are asked for; nothing is confirmed, as nothing was granted."""
    grant = Grant(lambda: None)
    full = Acquired(refusal=PoolExhausted("full"), waiting=True, grant=grant)
    owner = Owner(full, Acquired(leased=TABLE))
    assert owner.admissions.admit("waits", PROMPT) is None
    assert owner.admissions.admit("behind", PROMPT) is None
    assert len(owner.asked) == 1
    grant.end(ELSEWHERE)
    assert owner.admissions.admit("waits", PROMPT) is None
    assert owner.admissions.any_stood_back
    assert owner.admissions.admit("behind", PROMPT) is not None


def test_what_is_asked_for_once_more_is_no_request() -> None:
    """[E13] The grant was one."""
    grant = Grant(lambda: None)
    owner = Owner(Acquired(refusal=PoolExhausted("full"), waiting=True, grant=grant), Acquired())
    assert owner.admissions.admit("waits", PROMPT) is None
    grant.end(Acquired(leased=TABLE))
    assert owner.admissions.admit("waits", PROMPT) is not None
    again = owner.asked[-1]
    assert (again.table_block_count, again.computes, again.uses, again.unless_pending) == (0, False, False, False)


@pytest.mark.parametrize("end", [lambda admissions: admissions.cancel("waits"), Admissions.forget])
def test_who_is_cancelled_or_loses_the_epoch_stands_back_no_more(end: Callable[[Admissions], object]) -> None:
    """One of the same name is asked for at once."""
    owner = Owner(ELSEWHERE, Acquired(leased=TABLE))
    assert owner.admissions.admit("waits", PROMPT) is None
    end(owner.admissions)
    assert owner.admissions.admit("waits", PROMPT) is not None


def test_others_are_told_of_a_prompt_that_is_given_up() -> None:
    """[E18] As it was acquired, once, and not where all of it is published."""
    owner = Owner(*[Acquired(leased=TABLE)] * 2)
    owner.admissions.admit("given up", PROMPT)
    owner.admissions.admit("computed", PROMPT[1:])
    owner.admissions.ended("computed", 1)
    owner.admissions.ended("unknown", 0)
    assert not owner.abandoned
    owner.admissions.ended("given up", 1)
    owner.admissions.ended("given up", 1)
    assert owner.abandoned == [Chain(tokens=PROMPT[:8])]


def test_others_are_not_told_while_another_request_computes_it() -> None:
    """[E18]"""
    owner = Owner(*[Acquired(leased=TABLE)] * 2)
    for name in ("one", "two"):
        owner.admissions.admit(name, PROMPT)
    owner.admissions.ended("one", 0)
    assert not owner.abandoned
    owner.admissions.ended("two", 0)
    assert len(owner.abandoned) == 1


def test_others_are_told_of_what_was_granted_and_lost_again() -> None:
    """[E13] [E18] Also when it has not been asked for anew since."""
    grant = Grant(lambda: None)
    owner = Owner(Acquired(refusal=PoolExhausted("full"), waiting=True, grant=grant), Acquired())
    owner.admissions.admit("waits", PROMPT)
    grant.end(Acquired(held=TABLE[:1]))
    assert owner.admissions.admit("waits", PROMPT) is None
    owner.admissions.ended("waits", 0)
    assert owner.abandoned == [Chain(tokens=PROMPT[:8])]


def test_others_are_told_of_a_wait_that_was_cancelled() -> None:
    """[E18] It may have been granted just then; of one whose epoch has ended there is nothing to tell."""
    for is_over in (False, True):
        grant = Grant(lambda: None)
        owner = Owner(Acquired(refusal=PoolExhausted("full"), waiting=True, grant=grant))
        owner.admissions.admit("waits", PROMPT)
        if is_over:
            owner.admissions.forget()
        owner.admissions.cancel()
        assert owner.abandoned == ([] if is_over else [Chain(tokens=PROMPT[:8])])


def test_who_goes_on_keeps_nobody_waiting_longer() -> None:
    """The pause is for as many as stand back now."""
    owner = Owner(*[ELSEWHERE] * 20, *[Acquired(leased=TABLE)] * 20, ELSEWHERE, Acquired(leased=TABLE))
    for _ in range(2):
        for number in range(20):
            owner.admissions.admit(f"goes on {number}", PROMPT)
        owner.now += MOST_PAUSE_S
    assert owner.admissions.admit("waits", PROMPT) is None
    owner.now += STAND_BACK_S
    assert owner.admissions.admit("waits", PROMPT) is not None


def test_who_is_cancelled_ends_nobody_elses_wait() -> None:
    """Its place in the owner's queue is kept."""
    cancelled: list[None] = []
    grant = Grant(lambda: cancelled.append(None))
    owner = Owner(Acquired(refusal=PoolExhausted("full"), waiting=True, grant=grant))
    assert owner.admissions.admit("waits", PROMPT) is None
    owner.admissions.cancel("another")
    assert not cancelled
    owner.admissions.cancel("waits")
    assert cancelled
