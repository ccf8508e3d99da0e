"""What is asked: chats over shared system prompts, and prompts that share nothing; the same for all engines."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

VOCABULARY = range(100, 49_000)
SYSTEM_TOKENS = 384
TURN_TOKENS = 80
"""More than a block, so that each turn leaves one behind that the next can use."""
CHATS_OF_A_SYSTEM_PROMPT = 2
SYSTEM_PROMPTS = 2
ALONE_TOKENS = 200
ALONE_PROMPTS = 3


def tokens(seed: str, count: int) -> list[int]:
    """Returns token ids that depend on the seed alone."""
    drawn = random.Random(seed)
    return [drawn.choice(VOCABULARY) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat of one round, and what has been said in it."""

    name: str
    said: tuple[int, ...]

    def turn(self, number: int) -> "Chat":
        """Returns it with one more question."""
        return Chat(self.name, (*self.said, *tokens(f"{self.name} {number}", TURN_TOKENS)))

    def answered(self, answer_ids: tuple[int, ...]) -> "Chat":
        """Returns it with one more answer."""
        return Chat(self.name, self.said + answer_ids)


def chats(round_number: int) -> Iterator[Chat]:
    """Returns the chats of a round, those of one system prompt one after the other."""
    for system in range(SYSTEM_PROMPTS):
        said = tuple(tokens(f"system {round_number} {system}", SYSTEM_TOKENS))
        for chat in range(CHATS_OF_A_SYSTEM_PROMPT):
            yield Chat(f"chat-{round_number}-{system}-{chat}", said)


def alone(round_number: int, wave: int, engine: int) -> dict[str, list[int]]:
    """Returns prompts that no other engine has, and no other wave."""
    names = [f"alone-{round_number}-{wave}-{engine}-{number}" for number in range(ALONE_PROMPTS)]
    return {name: tokens(name, ALONE_TOKENS) for name in names}
