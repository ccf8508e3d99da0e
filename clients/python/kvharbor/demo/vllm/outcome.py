"""What the run has shown: who answered what, when what happened, where the memory is, and what follows from it."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvharbor.demo.vllm.memory import ProcessMemory

PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Answered:
    """One prompt as it was answered by one engine. Times are of the monotonic clock."""

    engine: str
    question: str
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    answer: str
    reused_tokens: int
    asked_s: float
    first_s: float
    done_s: float

    @property
    def ttft_s(self) -> float:
        """Seconds until its first token."""
        return self.first_s - self.asked_s


@dataclass(frozen=True, slots=True)
class Moments:
    """When what happened, by the monotonic clock."""

    begun_s: float
    engine_killed_s: float
    engine_back_s: float
    service_killed_s: float
    service_back_s: float


@dataclass(frozen=True, slots=True)
class Memory:
    """That of the two engines at the end, of the plain one at its start, and what the pool's file takes in all."""

    engines: tuple[ProcessMemory, ...]
    plain: ProcessMemory
    pool_allocated_bytes: int


@dataclass(frozen=True, slots=True)
class Run:
    """All that was seen. `plain` are the answers of an engine without a pool or a prefix cache.

    `sessions_went_on`: the surviving engine's session was the same one before and after the service's process was
    replaced, `restart_count` times in all.
    """

    block_tokens: int
    answered: tuple[Answered, ...]
    plain: tuple[Answered, ...]
    moments: Moments
    memory: Memory
    restart_count: int
    sessions_went_on: bool

    def answer(self, engine: str, question: str) -> Answered:
        """Returns the last answer of an engine to a question."""
        return [one for one in self.answered if (one.engine, one.question) == (engine, question)][-1]

    @property
    def identical_count(self) -> int:
        """Answers that are the plain engine's, token for token."""
        expected = {one.question: one.answer_ids for one in self.plain}
        return sum(one.answer_ids == expected[one.question] for one in self.answered)


@dataclass(frozen=True, slots=True)
class Claim:
    """What shall be true, whether it was, and what was seen."""

    claim: str
    held: bool
    seen: str


def whole_block_tokens(tokens: Sequence[int], block_tokens: int) -> int:
    """How many of a prompt's tokens can be reused: those of whole blocks, but at least one is computed."""
    return (len(tokens) - 1) // block_tokens * block_tokens


def common_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens two prompts have in common."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
