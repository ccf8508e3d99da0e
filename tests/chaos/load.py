"""What a worker does: at random all that can be done with sequences, and it verifies every byte that it holds.

Whatever fails for want of room or of the service leaves the worker with what the client says that it holds.
"""

import contextlib
import functools
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass

from chaos.board import Count
from chaos.held import Fence, Held, WrongBytes
from chaos.stamps import BLOCK_TOKENS
from chaos.universe import MOST_TOKENS, generated, prompt
from kvharbor.client import (
    EpochEnded,
    Full,
    HandoffNotFound,
    HarborError,
    PinNotFound,
    Pool,
    SequenceLost,
    StateRefused,
)
from kvharbor.client import Sequence as PoolSequence

MOST_HELD = 3
PIN_NAMES = tuple(f"chaos-pin-{number}" for number in range(4))
_PIN_TTL_S = 3.0
_PIN_BLOCKS = 3

Tally = Callable[..., None]
Tell = Callable[..., object]


@dataclass(frozen=True, slots=True)
class Given:
    """A sequence on its way to another worker."""

    handoff_token: str
    tokens: list[int]
    computed_tokens: int


class Load:
    """One session's sequences. `tally` counts what is done, `tell` has what is given away, and what was lost."""

    def __init__(
        self,
        pool: Pool,
        fence: Fence,
        chance: random.Random,
        tally: Tally,
        tell: Tell,
    ) -> None:
        self._pool = pool
        self._fence = fence
        self._chance = chance
        self._tally = tally
        self._tell = tell
        self._held: list[Held] = []

    def act(self) -> None:
        """Does one thing to one sequence. Raises WrongBytes, SessionGone, Unavailable."""
        self._tally(Count.ACTS)
        if not self._held or (len(self._held) < MOST_HELD and self._chance.random() < 0.4):
            action, weights = (self._allocate, self._warm), (12, 1)
            self._yielding(self._chance.choices(action, weights)[0])
            return
        held = self._chance.choice(self._held)
        actions = (self._grow, self._fork, self._hand_off, self._release)
        chosen = self._chance.choices(actions, (5, 2, 1, 3))[0]
        self._yielding(lambda: chosen(held))

    def adopt(self, given: Given) -> None:
        """Takes a sequence over, unless it has ended in the meantime."""
        with contextlib.suppress(HandoffNotFound):
            self._yielding(lambda: self._adopt(given))

    def settle(self) -> None:
        """Waits for nothing any more: no call is under way."""

    def verify_all(self) -> None:
        """Verifies everything that is held."""
        for held in list(self._held):
            self._yielding(functools.partial(self._verify, held))

    def release_all(self) -> None:
        """Verifies and releases all."""
        while self._held:
            self._yielding(lambda: self._release(self._held[-1]))

    def _yielding(self, action: Callable[[], None]) -> None:
        """Lets one sequence go where there is no room, or where one is no longer usable."""
        try:
            action()
        except Full:
            self._tally(Count.REFUSALS)
            if self._held:
                self._release(self._chance.choice(self._held))
        except StateRefused:
            self._drop_unusable()
        except (SequenceLost, EpochEnded) as ended:
            self._drop_lost(ended)

    def _drop_unusable(self) -> None:
        for held in list(self._held):
            try:
                held.sequence.require_usable()
            except StateRefused:
                with contextlib.suppress(StateRefused):
                    held.sequence.release()
                self._held.remove(held)

    def _drop_lost(self, cause: HarborError) -> None:
        """Forgets what has ended. A hand-off without an answer may have ended with the service's process, and may."""
        for held in list(self._held):
            if held.epochs == self._fence.epochs and held.sequence.ended and not held.sequence.leaving:
                self._tally(Count.LOST_SEQUENCES)
                self._tell("lost", text=f"{held.sequence!r}: {cause}")
            if held.epochs != self._fence.epochs or held.sequence.ended:
                self._held.remove(held)

    def _hold(self, sequence: PoolSequence, tokens: list[int]) -> Held:
        held = Held(sequence, tokens, self._fence, self._fence.epochs)
        self._held.append(held)
        return held

    def _adopt(self, given: Given) -> None:
        sequence = self._pool.adopt(given.handoff_token)
        held = self._hold(sequence, given.tokens)
        if (sequence.computed_tokens, sequence.token_count) != (given.computed_tokens, len(given.tokens)):
            raise WrongBytes(f"{sequence} was adopted, given away as {given.computed_tokens} of {len(given.tokens)}")
        self._tally(Count.ADOPTIONS)
        self._verify(held)

    def _allocate(self) -> None:
        tokens = prompt(self._chance)
        sequence = self._pool.allocate(
            tokens, reserve_tokens=self._chance.choice((0, 0, 20)), wait_s=self._chance.choice((0.0, 0.02))
        )
        held = self._hold(sequence, tokens)
        self._verify(held)
        self._tally(Count.ALLOCATIONS)
        self._tally(Count.HITS_VERIFIED, bool(sequence.cached_tokens))
        for _ in range(self._chance.randint(0, 2)):
            held.compute(self._pool, self._chance.randint(sequence.computed_tokens, len(tokens)))

    def _warm(self) -> None:
        name = self._chance.choice(PIN_NAMES)
        if self._chance.random() < 0.3:
            with contextlib.suppress(PinNotFound):
                self._pool.unwarm(name)
            return
        tokens = prompt(self._chance)[: _PIN_BLOCKS * BLOCK_TOKENS]
        if len(tokens) < BLOCK_TOKENS:
            return
        warm = self._pool.warmup(tokens, name, ttl_s=_PIN_TTL_S)
        self._tally(Count.WARMUPS)
        # The one that fills this pin already is told of again.
        if warm.sequence is not None and all(held.sequence is not warm.sequence for held in self._held):
            held = self._hold(warm.sequence, tokens[: warm.sequence.token_count])
            self._verify(held)
            held.compute(self._pool, self._chance.randint(warm.sequence.computed_tokens, len(held.tokens)))

    def _grow(self, held: Held) -> None:
        new_tokens = generated(self._chance, BLOCK_TOKENS) if len(held.tokens) < 2 * MOST_TOKENS else []
        held.compute(self._pool, len(held.tokens) + len(new_tokens), new_tokens)
        if self._chance.random() < 0.5 and held.sequence.switch_shadows():
            self._tally(Count.SHADOWS_SWITCHED)
        self._verify(held)

    def _fork(self, held: Held) -> None:
        children = held.sequence.fork(self._chance.randint(1, 2))
        for child in [self._hold(child, [*held.tokens]) for child in children]:
            self._tally(Count.FORKS)
            self._verify(child)

    def _hand_off(self, held: Held) -> None:
        self._verify(held)
        computed_tokens = held.sequence.computed_tokens
        token = held.sequence.handoff(computed_tokens)
        self._held.remove(held)
        self._tell("given", **asdict(Given(token, held.tokens, computed_tokens)))

    def _release(self, held: Held) -> None:
        with contextlib.suppress(StateRefused):
            self._verify(held)
        held.sequence.release()
        self._held.remove(held)

    def _verify(self, held: Held) -> None:
        self._tally(Count.BLOCKS_VERIFIED, held.verify(self._pool))
        self._tally(Count.TAILS_VERIFIED, bool(held.sequence.computed_tokens % BLOCK_TOKENS))
