"""When the next child starts, and with what."""

import signal

from kvharbor.server.restarts import (
    EXIT_BUG,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    MAX_BROKEN_COUNT,
    STEADY_S,
    Restarts,
    Verdict,
)

AT_ONCE = Verdict(0.0, cold=False)


def test_a_child_that_was_ready_is_replaced_at_once() -> None:
    """However often it is killed, and however soon."""
    restarts = Restarts()
    assert [restarts.judge(-signal.SIGKILL, served_s=0.0) for _ in range(10)] == [AT_ONCE] * 10


def test_children_that_never_get_ready_are_made_ever_more_slowly() -> None:
    """Up to a limit; one that gets ready ends it."""
    restarts = Restarts()
    pauses = [restarts.judge(2, served_s=None).pause_s for _ in range(10)]
    assert pauses[:4] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S, 8 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S
    assert restarts.judge(-signal.SIGKILL, served_s=1.0) == AT_ONCE
    assert restarts.judge(1, served_s=None).pause_s == FIRST_PAUSE_S


def test_what_breaks_again_and_again_is_dropped() -> None:
    """Before or after readiness, by a broken rule or a crash; once dropped, the count begins anew."""
    restarts = Restarts()
    ends = [(EXIT_BUG, 3.0), (-signal.SIGSEGV, None), (EXIT_BUG, 59.0)] * 2
    colds = [restarts.judge(status, served_s=served_s).cold for status, served_s in ends]
    assert len(ends) == 2 * MAX_BROKEN_COUNT
    assert colds == [False, False, True] * 2


def test_a_minute_of_service_is_a_proof_of_the_contrary() -> None:
    """So are ends from outside none at all: they neither count nor clear."""
    restarts = Restarts()
    ends = [(EXIT_BUG, 1.0), (EXIT_BUG, STEADY_S), (-signal.SIGKILL, 1.0), (EXIT_BUG, 1.0), (EXIT_BUG, 1.0)]
    assert [restarts.judge(status, served_s=served_s).cold for status, served_s in ends] == [False] * 4 + [True]
