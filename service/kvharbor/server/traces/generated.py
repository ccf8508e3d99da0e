"""Traces for those who have none: conversations of several turns that share system prompts. Seeded."""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from kvharbor.server.traces.recording import Recorded
from kvharbor.server.traces.segments import whole_blocks

_HASH_BYTES = 8
# About a fast reader's pause and a fast model's pace.
_MEAN_PAUSE_MS = 30_000
_OUTPUT_TOKEN_MS = 30
_MEAN_TURNS = 5
_SYSTEM_TOKENS = (512, 4096)
_QUESTION_TOKENS = (20, 800)
_ANSWER_TOKENS = (50, 600)


@dataclass(frozen=True, slots=True)
class Shape:
    """What to generate. A few of the system prompts are common, most are rare."""

    conversation_count: int = 500
    system_prompt_count: int = 20
    block_tokens: int = 64
    conversations_per_minute: float = 20.0
    seed: int = 1


@dataclass(slots=True)
class _Conversation:
    """One that goes on: what was said so far, as (segment, tokens)."""

    turns_left: int
    said: list[tuple[int, int]]


def generate(shape: Shape) -> Iterator[Recorded]:
    """Yields requests by arrival. The same shape gives the same ones."""
    chance = random.Random(shape.seed)
    segments = count()
    conversations, due = _conversations(shape, chance, segments)
    while due:
        now_ms, number = heappop(due)
        conversation = conversations[number]
        conversation.said.append((next(segments), chance.randint(*_QUESTION_TOKENS)))
        answer_tokens = chance.randint(*_ANSWER_TOKENS)
        duration_ms = answer_tokens * _OUTPUT_TOKEN_MS
        yield Recorded(
            now_ms,
            sum(tokens for _, tokens in conversation.said),
            answer_tokens,
            duration_ms,
            _block_hashes(conversation.said, shape.block_tokens),
        )
        conversation.said.append((next(segments), answer_tokens))
        conversation.turns_left -= 1
        if conversation.turns_left:
            heappush(due, (now_ms + duration_ms + round(chance.expovariate(1 / _MEAN_PAUSE_MS)), number))


def _conversations(
    shape: Shape, chance: random.Random, segments: Iterator[int]
) -> tuple[list[_Conversation], list[tuple[int, int]]]:
    """Returns conversations that have not begun, and when each does: (ms, its index), a heap."""
    systems = [(next(segments), chance.randint(*_SYSTEM_TOKENS)) for _ in range(shape.system_prompt_count)]
    popularity = [1 / (rank + 1) for rank in range(shape.system_prompt_count)]
    conversations = []
    due = []
    now_ms = 0.0
    for number in range(shape.conversation_count):
        now_ms += chance.expovariate(shape.conversations_per_minute / 60_000)
        due.append((round(now_ms), number))
        turn_count = 1 + int(chance.expovariate(1 / (_MEAN_TURNS - 1)))
        conversations.append(_Conversation(turn_count, chance.choices(systems, popularity)))
    return conversations, due


def _block_hashes(said: list[tuple[int, int]], block_tokens: int) -> tuple[str, ...]:
    """Hashes each whole block behind the hash of the one before."""
    digest = b""
    hashes = []
    for pieces in whole_blocks(said, block_tokens):
        digest = hashlib.sha256(digest + repr(pieces).encode()).digest()
        hashes.append(digest[:_HASH_BYTES].hex())
    return tuple(hashes)
