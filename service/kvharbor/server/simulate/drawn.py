"""Requests whose lengths are drawn, for those who have no trace. Seeded."""

import random
from array import array
from dataclasses import dataclass

from kvharbor.server.traces.trace import Request, Trace

REQUEST_COUNT = 10_000


@dataclass(frozen=True, slots=True)
class Span:
    """Whole numbers from `least` to `most`, each as likely as another."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a request. All prompts begin with the same `shared_tokens`, as far as they are that long."""

    prompt: Span
    output: Span
    shared_tokens: int = 0


def drawn(lengths: Lengths, block_tokens: int, seed: int) -> Trace:
    """Draws requests that are all there from the beginning."""
    chance = random.Random(seed)
    shared_count = lengths.shared_tokens // block_tokens
    requests = []
    for _ in range(REQUEST_COUNT):
        input_tokens = chance.randint(lengths.prompt.least, lengths.prompt.most)
        output_tokens = chance.randint(lengths.output.least, lengths.output.most)
        names = array("I", range(min(shared_count, input_tokens // block_tokens)))
        requests.append(Request(0, input_tokens, output_tokens, None, names))
    return Trace("drawn", block_tokens, tuple(requests), shared_count)
