"""One answer being generated: its tokens, how far its K and V are computed, and the sequence that holds them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kvharbor.engines.transformers.sampling import Chooser
from kvharbor.engines.transformers.step import Row


@dataclass(frozen=True, slots=True)
class Question:
    """What an answer is asked for; `key` is its place in the call, (prompt, answer)."""

    prompt: Sequence[int]
    key: tuple[int, int]
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    choose: Chooser


@dataclass(slots=True, eq=False)
class Stream:
    """State of one answer; owned by the loop that advances it.

    Waiting: `sequence` is None. Running: the pool holds K and V of the first `computed_tokens` of
    `token_ids`, and the rest is pending: much of the prompt at first, then one token at a time. A stream
    that lost its sequence to make room for others just waits again, with the tokens it has.
    """

    question: Question
    forks: list["Stream"] = field(default_factory=list)
    """Answers to the same prompt that start when its K and V are computed."""
    token_ids: list[int] = field(init=False)
    sequence: Any = None
    computed_tokens: int = 0
    reused_tokens: int | None = None
    started_s: float | None = None
    time_to_first_token_s: float | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.question.prompt)

    @property
    def pending_tokens(self) -> int:
        """Tokens whose K and V are not computed yet; at least 1 until the stream is finished."""
        return len(self.token_ids) - self.computed_tokens

    @property
    def answer(self) -> tuple[int, ...]:
        """The tokens generated so far."""
        return tuple(self.token_ids[len(self.question.prompt) :])

    @property
    def finished(self) -> bool:
        """Whether the answer is complete: long enough, or ended by a stop token, which is part of it."""
        answer_tokens = len(self.token_ids) - len(self.question.prompt)
        if answer_tokens == 0:
            return False
        return answer_tokens >= self.question.max_new_tokens or (self.token_ids[-1] in self.question.stop_token_ids)

    def start(self, sequence: Any) -> None:
        """Takes over a sequence; what it holds counts as computed."""
        self.sequence = sequence
        self.computed_tokens = sequence.computed_tokens
        if self.reused_tokens is None:
            self.reused_tokens = sequence.cached_tokens

    def next_row(self, token_limit: int) -> Row:
        """Returns the next pending tokens, at most `token_limit`, as work for one step."""
        end = min(self.computed_tokens + token_limit, len(self.token_ids))
        return Row(self.sequence.table, self.computed_tokens, self.token_ids[self.computed_tokens : end])

    def advance(self, computed_tokens: int, logits: Tensor) -> None:
        """Notes what a step wrote, and chooses the next token when nothing was left pending."""
        self.computed_tokens = computed_tokens
        if self.pending_tokens > 0:
            return
        self.token_ids.append(self.question.choose(logits, len(self.token_ids) - len(self.question.prompt)))
        if self.time_to_first_token_s is None and self.started_s is not None:
            self.time_to_first_token_s = time.monotonic() - self.started_s

    def has_full_block(self, block_tokens: int) -> bool:
        """Whether a block became full since the last commit."""
        committed_tokens: int = self.sequence.computed_tokens
        return self.computed_tokens // block_tokens > committed_tokens // block_tokens

    def commit(self) -> None:
        """Tells the pool what is computed, and so publishes the blocks that became full.

        Where another has published the same first, goes on with its blocks and gives up the own.
        """
        self.sequence.commit(self.computed_tokens, new_tokens=self.uncommitted_token_ids())
        self.sequence.switch_shadows()

    def uncommitted_token_ids(self) -> list[int]:
        """Computed tokens that the pool has not been told of."""
        return self.token_ids[self.sequence.token_count : self.computed_tokens]

    def finish(self, block_tokens: int) -> None:
        """Publishes what is full and releases the sequence."""
        if self.has_full_block(block_tokens):
            self.commit()
        self.stop()

    def lose(self) -> bool:
        """Takes in that the sequence is gone; returns whether there is still something to compute."""
        self.sequence, self.computed_tokens = None, 0
        return not self.finished

    def stop(self) -> None:
        """Releases the sequence, if there is one; committed blocks stay cached for others."""
        sequence, self.sequence, self.computed_tokens = self.sequence, None, 0
        if sequence is not None:
            sequence.release()


@dataclass(slots=True, eq=False)
class LeavingStream(Stream):
    """A stream that hands its sequence to another session when it is finished."""

    handoff_token: str = ""

    def lose(self) -> bool:
        """Takes in that the sequence is gone; as it is to be handed over, it is computed again in any case."""
        del self.token_ids[len(self.question.prompt) :]
        return Stream.lose(self)

    def finish(self, block_tokens: int) -> None:
        """Commits and gives the sequence away, partial tail included."""
        del block_tokens
        self.handoff_token = self.sequence.handoff(self.computed_tokens, new_tokens=self.uncommitted_token_ids())
        self.sequence = None
