"""Choosing the next token from logits."""

import hashlib
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvharbor.engines.transformers.errors import RequestInvalid

Chooser = Callable[[Tensor, int], int]
"""Takes the logits after a token, `[vocabulary]`, and how many tokens the answer has; returns the next one.

It keeps no state, so an answer may be preempted, computed again, or go on in another process.
"""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw tokens. `seed` None draws differently each time; an equal seed and prompt repeat."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise RequestInvalid("temperature", self.temperature, "above 0", "leave sampling out for greedy")
        if not 0 < self.top_p <= 1:
            raise RequestInvalid("top_p", self.top_p, "above 0 and at most 1", "1 keeps all tokens")
        if self.top_k < 0:
            raise RequestInvalid("top_k", self.top_k, "at least 0", "0 keeps all tokens")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise RequestInvalid("seed", self.seed, "a signed 64-bit number", "choose a smaller one")


def greedy(logits: Tensor, answer_tokens: int) -> int:
    """Chooses the most likely token."""
    del answer_tokens
    return int(logits.argmax())


def sampler(sampling: Sampling, *, prompt_index: int, answer_index: int) -> Chooser:
    """Returns a chooser for one answer of a call.

    Its draws depend on the seed and on the token's place (prompt, answer, position), never on what runs
    beside it.
    """
    seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))

    no_tokens = torch.empty((1, 0), dtype=torch.int64)

    def choose(logits: Tensor, answer_tokens: int) -> int:
        place = struct.pack("<4q", seed, prompt_index, answer_index, answer_tokens)
        draw_seed = int.from_bytes(hashlib.blake2b(place, digest_size=8).digest(), "little")
        generator = torch.Generator().manual_seed(draw_seed)
        scores = warpers(no_tokens, logits[None])  # type: ignore[arg-type]
        return int(torch.multinomial(torch.softmax(scores[0], -1), 1, generator=generator))

    return choose
