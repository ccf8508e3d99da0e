"""Ways to run requests through a cache."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from heapq import heappop, heappush
from typing import Final

from kvharbor.server.replay.cache import Cache
from kvharbor.server.traces.trace import Request

OUTPUT_TOKEN_MS: Final = 30
"""How long a token of output takes, where the trace has no durations."""


class Mode(StrEnum):
    """Whether requests overlap."""

    SEQUENTIAL = "sequential"
    CONCURRENT = "concurrent"


def run_sequentially(requests: Iterable[Request], cache: Cache) -> int:
    """Runs one request after the other; nothing is held between them, and outputs take no room.

    Returns how many blocks were hits.
    """
    hit_count = 0
    for index, request in enumerate(requests):
        if not request.block_names:
            continue
        matched = cache.admit(index, request, 0)
        assert matched is not None  # nothing is held, and each fits
        hit_count += matched
        cache.release(index)
    return hit_count


@dataclass(frozen=True, slots=True)
class Course:
    """How a concurrent run went. Waiting is from arrival to admission."""

    hit_block_count: int
    most_at_once: int
    waited_request_count: int
    waited_ms: float


def run_concurrently(requests: Iterable[Request], cache: Cache, output_block_count: Callable[[Request], int]) -> Course:
    """Runs requests in the trace's time, first come first served.

    A request holds its blocks, and as many nameless ones as `output_block_count` tells, from its admission to its
    end. One that does not fit waits for others to end, and all behind it wait too.
    """
    hit_count = most_at_once = waited_count = 0
    now_ms = waited_ms = 0.0
    running: list[tuple[float, int]] = []
    for index, request in enumerate(requests):
        now_ms = max(now_ms, request.arrival_ms)
        _end_until(now_ms, running, cache)
        nameless_count = output_block_count(request)
        if not request.block_names and not nameless_count:
            continue
        while (matched := cache.admit(index, request, nameless_count)) is None:
            now_ms = running[0][0]
            _end_until(now_ms, running, cache)
        hit_count += matched
        waited_count += now_ms > request.arrival_ms
        waited_ms += now_ms - request.arrival_ms
        heappush(running, (now_ms + _duration_ms(request), index))
        most_at_once = max(most_at_once, len(running))
    return Course(hit_count, most_at_once, waited_count, waited_ms)


def _end_until(now_ms: float, running: list[tuple[float, int]], cache: Cache) -> None:
    while running and running[0][0] <= now_ms:
        _, index = heappop(running)
        cache.release(index)


def _duration_ms(request: Request) -> float:
    if request.duration_ms is not None:
        return request.duration_ms
    return request.output_tokens * OUTPUT_TOKEN_MS
