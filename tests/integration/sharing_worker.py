"""A worker that does at random all that a worker can, and verifies every byte that it has not just written.

The stamp of a token is a hash of all tokens up to it, so that bytes of another prefix, another content or another
generation of a block never look right.
"""

import random
import struct
import traceback
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from integration.client_worker import BLOCK_TOKENS, LAYOUT, read, stamp
from kvharbor.client import HandoffNotFound, PoolExhausted, connect
from kvharbor.client import Sequence as PoolSequence

MOST_TOKENS = 5 * BLOCK_TOKENS
MOST_HELD = 3


def stamps_of(tokens: Sequence[int]) -> list[float]:
    """Returns what is written for each token: a whole number that float32 holds exactly."""
    digest = 0
    stamps = []
    for token in tokens:
        digest = zlib.crc32(struct.pack("<I", token), digest)
        stamps.append(float(digest & 0xFFFFFF))
    return stamps


@dataclass(frozen=True, slots=True)
class Given:
    """A sequence on its way to another worker."""

    handoff_token: str
    tokens: list[int]
    computed_tokens: int


@dataclass(slots=True)
class _Held:
    sequence: PoolSequence
    tokens: list[int]


class SharingWorker:
    """One session and what it holds. `give` takes what it hands off."""

    def __init__(self, target: str, pool_name: str, seed: int, give: Callable[[Given], None]) -> None:
        self._harbor = connect(target, client_name=f"sharing-{seed}")
        self._pool = self._harbor.open_pool(pool_name, LAYOUT)
        self._random = random.Random(seed)
        self._held: list[_Held] = []
        self._give = give

    def act(self) -> None:
        """Does one thing to one sequence."""
        if not self._held or (len(self._held) < MOST_HELD and self._random.random() < 0.4):
            self._allocate()
            return
        held = self._random.choice(self._held)
        action = self._random.choices([self._grow, self._fork, self._hand_off, self._release], [5, 2, 1, 3])[0]
        try:
            action(held)
        except PoolExhausted:
            self._release(self._random.choice(self._held))

    def adopt(self, given: Given) -> None:
        """Takes a sequence over, unless somebody has who died since."""
        try:
            sequence = self._pool.adopt(given.handoff_token)
        except HandoffNotFound:
            return
        assert (sequence.computed_tokens, sequence.token_count) == (given.computed_tokens, len(given.tokens))
        self._held.append(_Held(sequence, given.tokens))
        self._verify(self._held[-1])

    def close(self) -> None:
        """Verifies and releases all, and leaves."""
        while self._held:
            self._release(self._held[0])
        self._harbor.close()

    def _prompt(self) -> list[int]:
        """Returns one of few documents, often cut short and continued in one of few ways."""
        length, cut = self._random.randint(1, MOST_TOKENS), self._random.randint(0, MOST_TOKENS)
        document, ending = self._random.randrange(3), self._random.randrange(3)
        return [1000 * (document if place < cut else 10 + ending) + place for place in range(length)]

    def _allocate(self) -> None:
        tokens = self._prompt()
        reserve_tokens, wait_s = self._random.choice([0, 0, 20]), self._random.choice([0.0, 0.02])
        try:
            sequence = self._pool.allocate(tokens, reserve_tokens=reserve_tokens, wait_s=wait_s)
        except PoolExhausted:
            if self._held:
                self._release(self._held[0])
            return
        held = _Held(sequence, tokens)
        self._held.append(held)
        self._verify(held)
        self._compute(held, self._random.randint(sequence.cached_tokens, len(tokens)))

    def _compute(self, held: _Held, computed_tokens: int, new_tokens: Sequence[int] = ()) -> None:
        known = [*held.tokens, *new_tokens]
        first = held.sequence.computed_tokens
        stamp(self._pool, held.sequence, first, stamps_of(known)[first:computed_tokens])
        held.sequence.commit(computed_tokens, new_tokens)
        held.tokens = known

    def _grow(self, held: _Held) -> None:
        new_tokens = [50_000 + self._random.randrange(2)] * self._random.randint(0, BLOCK_TOKENS)
        missing = len(held.tokens) + len(new_tokens) - held.sequence.capacity_tokens
        if missing > 0:
            held.sequence.extend(missing)
        self._compute(held, len(held.tokens) + len(new_tokens), new_tokens)
        if self._random.random() < 0.5:
            held.sequence.switch_shadows()
        self._verify(held)

    def _fork(self, held: _Held) -> None:
        for child in held.sequence.fork(self._random.randint(1, 2)):
            self._held.append(_Held(child, [*held.tokens]))
            self._verify(self._held[-1])

    def _hand_off(self, held: _Held) -> None:
        self._verify(held)
        computed_tokens = held.sequence.computed_tokens
        self._held.remove(held)
        self._give(Given(held.sequence.handoff(computed_tokens), held.tokens, computed_tokens))

    def _release(self, held: _Held) -> None:
        self._verify(held)
        self._held.remove(held)
        held.sequence.release()

    def _verify(self, held: _Held) -> None:
        computed_tokens = held.sequence.computed_tokens
        if computed_tokens:
            expected = stamps_of(held.tokens[:computed_tokens])
            assert read(self._pool, held.sequence, 0, computed_tokens) == expected, held.sequence


def share(pipe: Connection, target: str, pool_name: str, seed: int, act_count: int) -> None:
    """Acts so many times; sends None after each, what it hands off, and a text if something is wrong.

    What comes through the pipe is adopted.
    """
    try:
        worker = SharingWorker(target, pool_name, seed, pipe.send)
        for _ in range(act_count):
            while pipe.poll():
                worker.adopt(pipe.recv())
            worker.act()
            pipe.send(None)
        worker.close()
    except Exception:
        pipe.send(traceback.format_exc())
