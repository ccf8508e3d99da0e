"""When the next child starts, and with what."""

import signal

import pytest

from kvharbor.server.supervision.restarts import (
    EXIT_BUG,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    MAX_BROKEN_COUNT,
    STEADY_S,
    Restarts,
    Verdict,
    cause_of,
)

AT_ONCE = Verdict(0.0, cold=False)


@pytest.mark.parametrize(
    ("status", "cause"),
    [(EXIT_BUG, "broken"), (-signal.SIGSEGV, "broken"), (-signal.SIGKILL, "killed"), (1, "failed"), (0, "failed")],
)
def test_an_exit_status_tells_the_cause(status: int, cause: str) -> None:
    """A broken rule or a crash, a signal from outside, or any other end that nobody has asked for."""
    assert cause_of(status) == cause


def test_a_child_that_was_ready_is_replaced_at_once() -> None:
    """However often it is killed, and however soon."""
    restarts = Restarts()
    assert [restarts.judge("killed", served_s=0.0) for _ in range(10)] == [AT_ONCE] * 10


def test_children_that_never_get_ready_are_made_ever_more_slowly() -> None:
    """Up to a limit; one that gets ready ends it."""
    restarts = Restarts()
    pauses = [restarts.judge("failed", served_s=None).pause_s for _ in range(10)]
    assert pauses[:4] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S, 8 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S
    assert restarts.judge("killed", served_s=1.0) == AT_ONCE
    assert restarts.judge("failed", served_s=None).pause_s == FIRST_PAUSE_S


def test_what_breaks_again_and_again_is_dropped() -> None:
    """Before or after readiness, by a broken rule or a crash; once dropped, the count begins anew."""
    restarts = Restarts()
    colds = [restarts.judge("broken", served_s=served_s).cold for served_s in [3.0, None, 59.0] * 2]
    assert len(colds) == 2 * MAX_BROKEN_COUNT
    assert colds == [False, False, True] * 2


def test_hanging_over_what_is_kept_is_breaking_on_it() -> None:
    """Before readiness, and once it had it. To hang over the imports, or while it serves, tells nothing of it."""
    restarts = Restarts()
    others = [restarts.judge("hung", served_s=None, had_kept=False), restarts.judge("hung", served_s=1.0)] * 2
    assert [verdict.cold for verdict in others] == [False] * 4
    assert [restarts.judge("hung", served_s=None).cold for _ in range(3)] == [False, False, True]


def test_a_minute_of_service_is_a_proof_of_the_contrary() -> None:
    """So are ends from outside none at all: they neither count nor clear."""
    restarts = Restarts()
    ends = [("broken", 1.0), ("broken", STEADY_S), ("killed", 1.0), ("broken", 1.0), ("broken", 1.0)]
    assert [restarts.judge(cause, served_s=served_s).cold for cause, served_s in ends] == [False] * 4 + [True]
