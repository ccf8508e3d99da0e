"""A trace, whatever file it comes from.

A block is known by its *name*: a small number for its content behind all that precedes it, so that equal names mean
equal prefixes, and a request's blocks are there as a leading run or not at all.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `block_names` are those of its input; `duration_ms` is None where the trace does not tell."""

    arrival_ms: float
    input_tokens: int
    output_tokens: int
    duration_ms: float | None
    block_names: "array[int]"

    def output_block_count(self, block_tokens: int) -> int:
        """Returns how many blocks its output fills, the last one perhaps in part."""
        return -(-self.output_tokens // block_tokens)


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests by arrival, ties in the order of the file; names are 0 to `unique_block_count` - 1."""

    name: str
    block_tokens: int
    requests: tuple[Request, ...]
    unique_block_count: int

    @property
    def asked_block_count(self) -> int:
        """Blocks of all inputs, each as often as it is asked for."""
        return sum(len(request.block_names) for request in self.requests)

    @property
    def hit_ceiling(self) -> float:
        """The share of blocks that memory without end would have: all but the first of each name."""
        asked = self.asked_block_count
        return (asked - self.unique_block_count) / asked if asked else 0.0


def by_arrival(requests: Iterable[Request]) -> tuple[Request, ...]:
    """Sorts requests as a trace has them."""
    return tuple(sorted(requests, key=lambda request: request.arrival_ms))
