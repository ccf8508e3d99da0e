"""How many requests fit at once: from many starts in a trace, one after the other until one does not fit."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from kvharbor.server.errors import CommandError
from kvharbor.server.simulate.layouts import Layout, Occupied
from kvharbor.server.simulate.room import Room
from kvharbor.server.traces.trace import Request

_WINDOW_COUNT = 100


@dataclass(frozen=True, slots=True)
class Fit:
    """Requests at once, and where the memory for KV is then; bytes are means over the windows.

    reserved = written + unused; with `left_over`, which nobody can have, they are all there is. `is_all`: the whole
    trace fits. Of its requests `served_count` can be served, `too_long_count` never fit.
    """

    layout: Layout
    mean_count: float
    least_count: int
    most_count: int
    written_bytes: float
    unused_bytes: float
    left_over_bytes: float
    is_all: bool
    served_count: int
    too_long_count: int


def fit(requests: Sequence[Request], layout: Layout, room: Room) -> Fit:
    """Fills the memory from up to a hundred starts, evenly spread."""
    unit_count = room.unit_count(layout.unit_tokens)
    served = servable(requests, layout, unit_count)
    full = _full_windows(served, layout, unit_count)
    is_all = not full
    windows = full or [_taken(served, layout)]
    written = fmean(one.written_tokens for one in windows) * room.token_bytes
    unused = fmean(one.unused_tokens for one in windows) * room.token_bytes
    return Fit(
        layout,
        mean_count=fmean(one.request_count for one in windows),
        least_count=min(one.request_count for one in windows),
        most_count=max(one.request_count for one in windows),
        written_bytes=written,
        unused_bytes=unused,
        left_over_bytes=room.kv_bytes - written - unused,
        is_all=is_all,
        served_count=len(served),
        too_long_count=len(requests) - len(served),
    )


def servable(requests: Sequence[Request], layout: Layout, unit_count: int) -> list[Request]:
    """Returns the requests that fit into an empty memory."""
    return [one for one in requests if layout.serves(one) and layout.unit_count(one) <= unit_count]


def bytes_needed(requests: Sequence[Request], layout: Layout, token_bytes: int, concurrency: int) -> int:
    """Returns the memory for KV that so many requests need at once, the most over windows of the trace."""
    served = [one for one in requests if layout.serves(one)]
    if len(served) < concurrency:
        raise CommandError(f"{concurrency:,} requests at once are asked for, and only {len(served):,} can be served")
    starts = _starts(len(served) - concurrency + 1)
    most = max(_taken(served[start : start + concurrency], layout).unit_count for start in starts)
    return most * layout.unit_tokens * token_bytes


def _starts(count: int) -> Iterator[int]:
    step_count = min(count, _WINDOW_COUNT)
    return (place * count // step_count for place in range(step_count))


def _full_windows(requests: Sequence[Request], layout: Layout, unit_count: int) -> list[Occupied]:
    """Returns what is taken at each start; none where fewer requests than would fit are left."""
    windows = []
    for start in _starts(len(requests)):
        window = _fill(requests, start, layout, unit_count)
        if window is None:
            # Nor do those that follow a later start fill it: they are some of these.
            break
        windows.append(window)
    return windows


def _fill(requests: Sequence[Request], start: int, layout: Layout, unit_count: int) -> Occupied | None:
    """Returns what is taken when the first request does not fit; None if all from `start` on do."""
    occupied = Occupied(layout)
    for index in range(start, len(requests)):
        if occupied.unit_count + occupied.added_unit_count(requests[index]) > unit_count:
            return occupied
        occupied.add(requests[index])
    return None


def _taken(requests: Sequence[Request], layout: Layout) -> Occupied:
    occupied = Occupied(layout)
    for request in requests:
        occupied.add(request)
    return occupied
