"""Long operations in slices.

An operation of the pool is a generator: each `yield` ends a slice, at a point where every invariant holds,
and the caller may run other sessions' operations before it goes on. A short operation never yields.
"""

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")

Steps = Generator[None, None, T]


def finish(steps: Steps[T]) -> T:
    """Runs an operation to its end and returns its result."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            result: T = stop.value
            return result
