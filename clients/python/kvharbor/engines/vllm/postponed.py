"""Requests that are not asked for anew at once: when they are, and how often there is a call for any of them."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from math import inf

from vllm.v1.request import Request

PAUSE_PER_CALL = 10
"""Calls for them are so many times as far apart as the last one took: long prompts cost more, and the step waits."""
MOST_PAUSE_S = 1.0
"""But no further: a call that took very long has met a service that was away."""


class Postponed:
    """Names of requests, each with its time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until_s: dict[str, float] = {}
        self._quiet_until_s = 0.0

    def __len__(self) -> int:
        return len(self._until_s)

    def __iter__(self) -> Iterator[str]:
        return iter(self._until_s)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._until_s

    def add(self, request_id: str, pause_s: float) -> None:
        """A request is not asked for during this time."""
        self._until_s[request_id] = self._clock() + pause_s

    def discard(self, request_id: str) -> None:
        """A request is asked for at once, if it ever is; repeating it is nothing."""
        self._until_s.pop(request_id, None)

    def due(self, requests: Iterable[Request]) -> list[Request]:
        """Returns those whose time has come, first the one for whom it has the longest ago."""
        now = self._clock()
        if not self._until_s or now < self._quiet_until_s:
            return []
        due = [each for each in requests if self._until_s.get(each.request_id, inf) <= now]
        return sorted(due, key=lambda request: self._until_s[request.request_id])

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Runs a call for those who are due."""
        began_at_s = self._clock()
        yield
        now = self._clock()
        self._quiet_until_s = now + min(PAUSE_PER_CALL * (now - began_at_s), MOST_PAUSE_S)
