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


def repeat(call: Callable[[], object]) -> None:
    """Makes a call until it fails."""
    while True:
        call()
