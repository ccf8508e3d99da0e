"""Sequences that a DecodeBatch runs: a token each step, without a call, and every byte of them verified."""

import random
from dataclasses import asdict

import numpy as np

from chaos.board import Count
from chaos.held import Fence, Held, WrongBytes
from chaos.load import Tally, Tell
from chaos.stamps import BLOCK_TOKENS, slots, stamps, verify, write
from chaos.universe import next_token, prompt, variant
from kvharbor.client import (
    Credits,
    DecodeBatch,
    Full,
    HarborError,
    Namespace,
    Pool,
    Sequence,
    Unavailable,
)

_MOST_RUNNING = 2
_CREDITS = 3
_IDLE_S = 0.2
_LEASE_TIMEOUT_S = 0.5
_MOST_STEPS = 2 * BLOCK_TOKENS
_MOST_TOKENS = 10 * BLOCK_TOKENS


class Decoder:
    """The batch of one session, with its credits. The KV of all tokens that it has taken is written."""

    def __init__(self, pool: Pool, fence: Fence, chance: random.Random, tally: Tally, tell: Tell) -> None:
        self._pool = pool
        self._fence = fence
        self._chance = chance
        self._tally = tally
        self._tell = tell
        self._credits = Credits(pool, _CREDITS, idle_s=_IDLE_S)
        self._batch = DecodeBatch(pool, self._credits, lease_timeout_s=_LEASE_TIMEOUT_S)
        self._running: list[Held] = []

    def act(self) -> None:
        """Takes a sequence in, steps for a while, or lets one go."""
        if not self._running or (len(self._running) < _MOST_RUNNING and self._chance.random() < 0.3):
            self._join()
        elif self._chance.random() < 0.2:
            self._leave(self._chance.choice(self._running))
        else:
            for _ in range(self._chance.randint(1, _MOST_STEPS)):
                if self._running:
                    self._step()
            self.verify_all()

    def verify_all(self) -> int:
        """Compares every byte of all sequences; returns how many whole blocks that were."""
        return sum(map(self._verify, [*self._running]))

    def drop_ended(self, cause: HarborError) -> None:
        """Forgets what has ended, with its epoch or otherwise, which must not be."""
        for held in [*self._running]:
            if held.epochs == self._fence.epochs and held.sequence.ended:
                self._tally(Count.LOST_SEQUENCES)
                self._tell("lost", text=f"{held.sequence!r} in a batch: {cause}")
            if held.epochs != self._fence.epochs or held.sequence.ended:
                self._drop(held)

    def release_all(self) -> None:
        """Ends all sequences, and gives the credits back."""
        for held in [*self._running]:
            self._drop(held)
        self._credits.close()

    def _join(self) -> None:
        tokens, namespace = prompt(self._chance), Namespace(version=self._pool.blocks.version)
        sequence = self._pool.allocate(tokens, wait_s=self._chance.choice((0.0, 0.02)))
        held = Held(sequence, tokens, self._fence, self._fence.epochs, variant(namespace))
        try:
            self._tally(Count.DECODED_BLOCKS_VERIFIED, held.verify(self._pool))
            held.compute(self._pool, len(tokens))
            self._batch.join(sequence)
        except HarborError:
            sequence.release()
            raise
        self._running.append(held)

    def _step(self) -> None:
        """Has each sequence get a token, and writes the KV of these as the forward pass behind a step does."""
        rows = [self._held_by(sequence) for sequence in self._batch.sequences]
        tokens = [next_token(self._chance) for _ in rows]
        step = self._batch.step(tokens)
        self._tally(Count.DECODE_STEPS)
        going = [(rows[row], tokens[row]) for row in step.rows.tolist()]
        for held, token in going:
            held.tokens = [*held.tokens, token]
        if going:
            values = np.concatenate([stamps(held.tokens, held.variant)[-1:] for held, _ in going])
            with self._fence.touching(rows[0].epochs):
                write(self._pool, step.slots, values)
        self._tally(Count.DECODED_TOKENS, len(going))
        for row, refusal in step.refused.items():
            self._refused(rows[row], refusal)
        for held in [*self._running]:
            if len(held.tokens) >= _MOST_TOKENS:
                self._leave(held)

    def _refused(self, held: Held, refusal: HarborError) -> None:
        if isinstance(refusal, Full):
            self._tally(Count.REFUSALS)
            self._drop(held)
        elif isinstance(refusal, Unavailable):
            self._tally(Count.CALLS_WITHOUT_OWNER)
        else:
            raise refusal

    def _leave(self, held: Held) -> None:
        """Takes a sequence out of the batch, and ends it by itself."""
        self._verify(held)
        sequence = held.sequence
        try:
            self._batch.leave(sequence)
        except HarborError:
            if sequence.batch is None:
                self._running.remove(held)
                sequence.release()
            raise
        self._running.remove(held)
        if (sequence.token_count, sequence.computed_tokens + 1) < (len(held.tokens), len(held.tokens)):
            raise WrongBytes(f"{sequence!r} has left a batch that had given it {len(held.tokens)} tokens")
        try:
            self._tally(Count.DECODED_BLOCKS_VERIFIED, held.verify(self._pool))
        finally:
            sequence.release()

    def _drop(self, held: Held) -> None:
        self._running.remove(held)
        self._batch.release([held.sequence])

    def _verify(self, held: Held) -> int:
        held.sequence.require_held()
        row = self._batch.sequences.index(held.sequence)
        if (token_count := int(self._batch.token_counts[row])) != len(held.tokens):
            raise WrongBytes(f"{held.sequence!r} has {token_count} tokens in its batch, was given {len(held.tokens)}")
        places = slots(self._batch.tables[row], 0, token_count)
        with self._fence.touching(held.epochs):
            wrong = verify(self._pool, places, stamps(held.tokens, held.variant))
        if wrong is not None:
            held.sequence.require_held()
            raise WrongBytes(f"{held.sequence!r} in a batch, {places[0][::BLOCK_TOKENS]}: {asdict(wrong)}")
        self._tally(Count.DECODED_BLOCKS_VERIFIED, token_count // BLOCK_TOKENS)
        return token_count // BLOCK_TOKENS

    def _held_by(self, sequence: Sequence) -> Held:
        return next(held for held in self._running if held.sequence is sequence)
