"""A decode batch under scripts at random, with deaths of the service's process in between, against lists of tokens."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_service import FakeService
from fake_stream import blocks_of
from integration.client_worker import BLOCK_TOKENS, LAYOUT
from kvharbor.client import Credits, DecodeBatch, Pool, Sequence, Unavailable, connect
from waiting import until

NAMES = ("join", "step", "steps", "leave", "release", "sync", "die", "die before", "die after")


class Script:
    """One batch, and what its sequences have to have."""

    def __init__(self, service: FakeService, pool: Pool) -> None:
        self.service = service
        self.pool = pool
        self.credits = Credits(pool, 16)
        self.batch = DecodeBatch(pool, self.credits)
        self.tokens: dict[str, list[int]] = {}
        self.left: list[Sequence] = []
        self._next = 10_000

    def run(self, name: str, number: int) -> None:
        """Does one thing."""
        does: dict[str, Callable[[int], None]] = {
            "join": self._join,
            "step": lambda _: self._step(1),
            "steps": lambda count: self._step(5 * count),
            "leave": self._leave,
            "release": self._release,
            "sync": lambda _: self.batch.sync(),
            "die": lambda _: self.service.restart(),
            "die before": lambda _: self._die(self.service.blocks.before),
            "die after": lambda _: self._die(self.service.blocks.after),
        }
        does[name](number)
        self.check()

    def check(self) -> None:
        """The columns have what the lists have, and no two sequences a block."""
        counts = [len(self.tokens[sequence.id]) for sequence in self.batch.sequences]
        assert self.batch.token_counts.tolist() == counts
        tables = [self.batch.tables[row, : self.batch.block_counts[row]] for row in range(len(counts))]
        assert all(len(table) * BLOCK_TOKENS >= count for table, count in zip(tables, counts, strict=True))
        named = [int(block) for table in tables for block in table]
        assert len({*named}) == len(named)

    def finish(self) -> None:
        """Everything is told, once, and nothing else is; then all of it is given back."""
        for sequence in [*self.batch.sequences]:
            self.batch.leave(sequence)
            self.left.append(sequence)
        self.pool.stats()  # waits for a process that is to be told
        told = self._told()
        for sequence in self.left:
            tokens = self.tokens[sequence.id]
            known = self.service.sequences[sequence.id]
            assert (sequence.token_count, known.token_count) == (len(tokens), len(tokens))
            assert [block for block, _ in blocks_of(known.table)] == sequence.table.tolist()
            for position, token in told.get(sequence.id, {}).items():
                assert tokens[position] == token
            sequence.release()
        self.credits.close()
        self.pool.blocks.flush()
        until(lambda: not self.service.blocks.own)
        self.pool.blocks.flush()
        assert (len(self.pool.own_blocks), self.service.sequences) == (0, {})

    def _join(self, number: int) -> None:
        first = [*range(1000 * number, 1000 * number + 1 + 7 * number)]
        sequence = self.pool.allocate(first, reserve_tokens=number % 3 * BLOCK_TOKENS)
        while sequence.commit(len(first)).pending:
            self.pool.stats()
        self.batch.join(sequence)
        self.tokens[sequence.id] = first

    def _step(self, count: int) -> None:
        for _ in range(count):
            new = np.arange(self._next, self._next + len(self.batch))
            self._next += len(self.batch)
            step = self.batch.step(new)
            for row in step.rows.tolist():
                self.tokens[self.batch.sequences[row].id].append(int(new[row]))
            for refusal in step.refused.values():
                assert isinstance(refusal, Unavailable), refusal

    def _leave(self, number: int) -> None:
        if len(self.batch):
            sequence = self.batch.sequences[number % len(self.batch)]
            self.batch.leave(sequence)
            self.left.append(sequence)
            assert sequence.token_count == len(self.tokens[sequence.id])

    def _release(self, number: int) -> None:
        if len(self.batch):
            self.batch.release([self.batch.sequences[number % len(self.batch)]])

    def _die(self, hooks: dict[str, Callable[[], None]]) -> None:
        """Has the process die at its next commit, once."""

        def die() -> None:
            if hooks.pop("commit", None) is not None:
                self.service.restart()

        hooks["commit"] = die

    def _told(self) -> dict[str, dict[int, int]]:
        """Which token was named for which place of a sequence, by commits and by Resume."""
        told: dict[str, dict[int, int]] = {}

        def name(sequence_id: str, first: int, token_ids: bytes) -> None:
            places = told.setdefault(sequence_id, {})
            for place, token in enumerate(np.frombuffer(token_ids, "<u4").tolist(), first):
                assert places.setdefault(place, token) == token

        for request in self.service.blocks.of_kind("commit"):
            for item in request.items:
                name(item.sequence_id, item.known_token_count, item.new_token_ids)
        for resume in self.service.calls["Resume"]:
            for held in resume.sequences:
                name(held.sequence.sequence_id, held.committed_tokens, held.tail_token_ids)
        return told


@pytest.mark.slow
@settings(max_examples=25)
@given(st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 6)), min_size=5, max_size=25))
def test_what_is_told_is_what_was_stepped(script: list[tuple[str, int]]) -> None:
    """C20: whatever dies when, each sequence has its tokens, each once and in its place, and its own blocks."""
    with tempfile.TemporaryDirectory() as folder:
        service = FakeService(Path(folder), LAYOUT, block_count=4096)
        service.blocks.free_count = 1500
        try:
            with connect(service.target) as harbor:
                running = Script(service, harbor.open_pool("p", LAYOUT))
                for name, number in script:
                    running.run(name, number)
                running.finish()
        finally:
            service.close()
