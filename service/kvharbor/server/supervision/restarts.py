"""When the next child starts, and with what: at once, after a pause, or from nothing."""

import signal
from dataclasses import dataclass

EXIT_UNUSABLE = 2
"""Exit status of a process that cannot start as it is configured."""
EXIT_BUG = 70
"""Exit status after an invariant violation: the code of a software error in sysexits.h."""

STEADY_S = 60.0
MAX_BROKEN_COUNT = 3
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 10.0

CRASHES = frozenset({-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGILL, -signal.SIGFPE})
"""Statuses of processes that the kernel ended for what they did."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do after a child's end: pause for so long, and forget everything kept if `cold`."""

    pause_s: float
    cold: bool


def cause_of(status: int) -> str:
    """Names what an exit status (negative: the signal) tells: broken, killed or failed."""
    if status == EXIT_BUG or status in CRASHES:
        return "broken"
    return "killed" if status < 0 else "failed"


class Restarts:
    """Judges the ends of children, one after the other.

    A child that was ready is replaced at once. One that never was makes the pause before the next longer. Several that
    broke one after the other, without a minute of service between, are taken as proof that what is kept is broken; who
    hangs over taking it up has broken on it too.
    """

    def __init__(self) -> None:
        self._unready_count = 0
        self._broken_count = 0

    def judge(self, cause: str, *, served_s: float | None, had_kept: bool = True) -> Verdict:
        """Judges an end by its cause, as `cause_of` names it, or "hung".

        `served_s` is the time since readiness, None before it. `had_kept`: it had come so far as to be given what is
        kept; who hangs over its imports has not.
        """
        if served_s is not None and served_s >= STEADY_S:
            self._broken_count = 0
        if cause == "broken" or (cause == "hung" and served_s is None and had_kept):
            self._broken_count += 1
        cold = self._broken_count >= MAX_BROKEN_COUNT
        if cold:
            self._broken_count = 0
        if served_s is not None:
            self._unready_count = 0
            return Verdict(0.0, cold)
        self._unready_count += 1
        return Verdict(min(FIRST_PAUSE_S * 2 ** (self._unready_count - 1), LONGEST_PAUSE_S), cold)
