"""Waits for what another process does: until it is seen, with a deadline."""

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

DEADLINE_S = 20.0


def until(look: Callable[[], T], is_there: Callable[[T], bool] = bool) -> T:
    """Looks again and again until `is_there`, and returns what was seen; fails at the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_there(seen := look()):
        assert time.monotonic() < deadline, f"still {seen}"
        os.sched_yield()
    return seen


def seconds(work: Callable[[], object]) -> float:
    """Returns how long it took."""
    began_at = time.monotonic()
    work()
    return time.monotonic() - began_at


def quickest(measure: Callable[[], float], within_s: float, most_tries: int = 3) -> float:
    """Measures until it is less, a few times at most; returns the least: a busy machine takes longer now and then."""
    took_s = [measure()]
    while min(took_s) >= within_s and len(took_s) < most_tries:
        took_s.append(measure())
    return min(took_s)


def repeat(call: Callable[[], object]) -> None:
    """Makes a call until it fails."""
    while True:
        call()
