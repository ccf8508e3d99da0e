"""What engines of one kind have shown."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvharbor.demo.vllm.outcome import Answered

KINDS = ("plain", "pool", "copy")
COUNT = 2
"""Engines of each kind."""
BLOCK_TOKENS = 64
KV_BYTES = 192 << 20
"""Of one cache: an engine's own, or the pool."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What one round has shown of one kind."""

    answered: tuple[Answered, ...]
    admission_us: tuple[float, ...]
    decode_us: tuple[float, ...]

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were not there."""
        return sum(len(one.prompt_ids) - one.reused_tokens for one in self.answered)

    @property
    def least_computed_tokens(self) -> int:
        """As many as have to be computed if each prefix is computed once, whoever asks for it."""
        known: set[tuple[int, ...]] = set()
        least = 0
        for one in sorted(self.answered, key=lambda one: one.asked_s):
            prefixes = _whole_blocks(one.prompt_ids[:-1])
            least += len(one.prompt_ids) - max((len(prefix) for prefix in prefixes if prefix in known), default=0)
            known.update(_whole_blocks(one.prompt_ids + one.answer_ids[:-1]))
        return least

    @property
    def answer_tokens_per_s(self) -> float:
        """Of both engines together."""
        began_s, ended_s = min(one.asked_s for one in self.answered), max(one.done_s for one in self.answered)
        return sum(len(one.answer_ids) for one in self.answered) / (ended_s - began_s)


def together(seen: Sequence[Seen]) -> Seen:
    """Returns what several have shown as one."""
    return Seen(
        tuple(one for each in seen for one in each.answered),
        tuple(time for each in seen for time in each.admission_us),
        tuple(time for each in seen for time in each.decode_us),
    )


def _whole_blocks(tokens: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [tokens[:end] for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS)]
