"""Exactly the moment that a test wants: what is run there, once, and what waits there until the test goes on."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from fake_process import DEADLINE_S
from kvharbor.client import Unavailable

Hooks = dict[str, Callable[[], None]]
"""As a `FakeService` and its stream have them, `before` and `after`: by the kind of a request."""


def once(hooks: Hooks, kind: str, run: Callable[[], object]) -> None:
    """Has something run at the next request of a kind, and not again."""

    def hook() -> None:
        hooks.pop(kind, None)
        run()

    hooks[kind] = hook


def wait(event: threading.Event) -> None:
    """Waits until an event has come, with a deadline."""
    assert event.wait(DEADLINE_S)


def wait_for(event: threading.Event) -> Callable[[], None]:
    """Returns what waits for an event."""
    return lambda: wait(event)


GIVEN_UP_S = 1.0
"""Enough for a call to be sent on a busy machine, where a test needs one that is given up behind that."""


@contextlib.contextmanager
def hurried(pool: Any, timeout_s: float = GIVEN_UP_S) -> Iterator[None]:
    """Gives the calls of a pool's harbor no more time than this meanwhile; what is made before has a deadline's."""
    link, options = pool.link, pool.link.options
    link.options = replace(options, timeout_s=timeout_s)
    try:
        yield
    finally:
        link.options = options


def answered(pool: Any) -> bool:
    """Whether the service answers a client's pool just now."""
    try:
        pool.stats()
    except Unavailable:
        return False
    return True


def halt(asked: threading.Event, go_on: threading.Event) -> Callable[[], None]:
    """Returns what says that it is there, and then waits."""

    def halted() -> None:
        asked.set()
        wait(go_on)

    return halted
