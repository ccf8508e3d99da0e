"""Signs that a session is at work, given while a step of its engine lasts [C21].

They are given by the thread that sends on the session's stream. A step that is over before the first of them is due
wakes nobody.
"""

import time
import weakref
from collections.abc import Callable
from typing import Any, Final

PERIOD_S: Final = 0.5
LONGEST_S: Final = 60.0
"""The service believes none that is given later in a step."""


class Computing:
    """Whether a step of an engine is under way. One thread uses it; as a context it is a step.

    Other sessions wait for what this one has said that it computes, as long as it commits something every 2 s. Where a
    step lasts longer, signs have them wait on, for a minute at most. `begin` and `end` wait for nothing.
    """

    __slots__ = ("_signs", "began_s", "is_under_way", "tell")

    def __init__(self, signs: "Signs", tell: "weakref.WeakMethod[Callable[[], Any]]") -> None:
        self.began_s = -LONGEST_S
        self.is_under_way = False
        self.tell = tell
        self._signs = signs

    def begin(self) -> None:
        """A step has begun; of several that overlap, the next one."""
        self.began_s = time.monotonic()
        self.is_under_way = True
        if self._signs.dozing:
            self._signs.wake()

    def end(self) -> None:
        """No step is under way any more, be it that it has failed; repeating it does nothing."""
        self.is_under_way = False

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *_: object) -> None:
        self.end()


class Signs:
    """When the thread that sends has to give signs. It keeps alive neither the stream nor its pools.

    `dozing`: that thread looks no more by itself, as nothing has begun for a while; `awaken` has it look.
    """

    def __init__(self, awaken: "weakref.WeakMethod[Callable[[], Any]]") -> None:
        self.dozing = True
        self._awaken = awaken
        self._steps: list[Computing] = []
        self._given_s = -LONGEST_S

    def step(self, tell: "weakref.WeakMethod[Callable[[], Any]]") -> Computing:
        """Returns what an engine says of its steps in one pool; `tell` gives the sign."""
        made = Computing(self, tell)
        self._steps.append(made)
        return made

    def drop(self, step: Computing) -> None:
        """Gives no signs of it any more; repeating it does nothing."""
        step.end()
        if step in self._steps:
            self._steps.remove(step)

    def wake(self) -> None:
        """Has the thread look; there may be none yet."""
        self.dozing = False
        awaken = self._awaken()
        if awaken is not None:
            awaken()

    # In the thread that sends

    def pause_s(self) -> float | None:
        """Returns after which time a sign is due, if the steps last so long; None: not before `wake`."""
        pause_s = self._pause_s()
        if pause_s is None:
            self.dozing = True
            pause_s = self._pause_s()  # one may have begun that has found it awake
            self.dozing = pause_s is None
        return pause_s

    def give(self) -> None:
        """Gives a sign of each step that lasts. Not under the guard, nor the lock of what is sent."""
        self._given_s = now_s = time.monotonic()
        for step in [*self._steps]:
            if step.is_under_way and step.began_s + PERIOD_S <= now_s:
                tell = step.tell()
                if tell is not None:
                    tell()

    def _pause_s(self) -> float | None:
        now_s = time.monotonic()
        began_s = [step.began_s for step in [*self._steps] if step.is_under_way and now_s - step.began_s < LONGEST_S]
        if began_s:
            due_s = max(min(began_s), self._given_s) + PERIOD_S
            return due_s - now_s if due_s > now_s else 0.0
        # Another step is likely to follow, and would have to wake it.
        has_begun = any(now_s - step.began_s < 2 * PERIOD_S for step in [*self._steps])
        return PERIOD_S if has_begun else None
