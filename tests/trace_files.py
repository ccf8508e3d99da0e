"""Traces to test with: tiny ones, made of letters, and the real ones where they are."""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvharbor.server.traces.names import Names
from kvharbor.server.traces.trace import Request, Trace, by_arrival

_REAL = Path(__file__).parents[2] / "shared" / "traces"


def real_trace(name: str) -> Path:
    """Returns the path of a real trace, or skips the test that needs it."""
    path = _REAL / name
    if not path.exists():
        pytest.skip(f"needs ../shared/traces/{name}, which is not there")
    return path


def asked(prompt: str, *, at_ms: float = 0, output_tokens: int = 0, duration_ms: float | None = None) -> Request:
    """Returns a request for a block of each letter, to be given to `trace_of`."""
    return Request(at_ms, len(prompt), output_tokens, duration_ms, array("I", map(ord, prompt)))


def trace_of(*requests: Request | str) -> Trace:
    """Returns a trace in blocks of one token. The same letters in front of it make a letter the same block."""
    names = Names()
    given: Sequence[Request] = [asked(one) if isinstance(one, str) else one for one in requests]
    named = by_arrival(replace(one, block_names=names.of(one.block_names)) for one in given)
    return Trace("letters", 1, named, len(names))
