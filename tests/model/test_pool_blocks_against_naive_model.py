"""Block calls, sequences and all else of the pool, driven together with a naive model of them."""

import os
from array import array
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from naive import DoesNotFit, Path
from naive_blocks import HeldByOthers, NaiveBlocks
from test_pool_against_naive_model import BLOCK_TOKENS, BLOCKS, MOST_ENTRIES, NAMESPACES, PoolMachine, encode

from kvharbor.pool import Acquired, BlockRun, Chain
from kvharbor.pool.errors import BlockHeld, PoolExhausted
from kvharbor.pool.steps import Steps, finish

# Whole blocks.
CONTENTS = st.lists(st.sampled_from([(1, 1), (1, 2), (2, 1)]), max_size=4)
WHICH = st.integers(0, 11)


@dataclass(eq=False)
class Kept:
    """One block that a session holds by itself, in both worlds: leased without a path, or of what is at one."""

    generation: int
    path: Path | None = None
    is_shadow: bool = False


def chain_of(namespace: str, contents: list[tuple[int, int]]) -> Chain:
    version, _, salt = namespace.partition("/")
    tokens = [token for content in contents for token in content]
    return Chain(token_ids=encode(tokens), version=version, salt=salt.encode())


class BlockMachine(PoolMachine):
    """[B1] to [B4] too."""

    naive: NaiveBlocks

    def __init__(self) -> None:
        super().__init__()
        self.naive = NaiveBlocks(BLOCKS, BLOCK_TOKENS, MOST_ENTRIES)
        self.kept: dict[int, dict[int, Kept]] = {}

    def session_of(self, which: int) -> int:
        return self.sessions[which % len(self.sessions)]

    def take(self, session: int, run: BlockRun) -> list[int]:
        for block, generation in zip(run.block_ids, run.generations, strict=True):
            self.kept.setdefault(session, {})[block] = Kept(generation)
        return list(run.block_ids)

    def run_of(self, session: int, blocks: list[int]) -> BlockRun:
        return BlockRun(array("I", blocks), array("Q", [self.kept[session][block].generation for block in blocks]))

    def read_block(self, block: int, path: Path) -> None:
        assert self.memory[block] == self.stamp_of(path), "G1: wrong bytes"

    def stamp_of(self, path: Path) -> object:
        return (path[0], tuple(token for chunk in path[1] for token in chunk))

    @rule(which=WHICH, contents=CONTENTS, namespace=NAMESPACES, table=st.integers(0, 6))
    def acquire(self, which: int, contents: list[tuple[int, int]], namespace: str, table: int) -> None:
        session = self.session_of(which)
        tokens = [token for content in contents for token in content]
        self.run_acquire(
            session, namespace, tokens, table, self.pool.acquire(session, chain_of(namespace, contents), table)
        )

    def run_acquire(
        self, session: int, namespace: str, tokens: list[int], table: int, steps: Steps[Acquired]
    ) -> Acquired | None:
        """An ordinary acquire, in both worlds; None if it does not fit."""
        try:
            held_count, leased_count = self.naive.acquire(session, namespace, tokens, table)
        except DoesNotFit:
            self.rematch_recency(namespace, tokens, len(tokens))
            with pytest.raises(PoolExhausted):
                finish(steps)
            return None
        found = finish(steps)
        assert (len(found.held), len(found.leased)) == (held_count, leased_count)
        paths = self.naive.paths(namespace, tokens)
        for block, path in zip(self.take(session, found.held), paths, strict=False):
            self.kept[session][block].path = path
            self.read_block(block, path)
        self.take(session, found.leased)
        return found

    @rule(which=WHICH, least=st.integers(0, 4), more=st.integers(0, 4))
    def lease(self, which: int, least: int, more: int) -> None:
        session, want = self.session_of(which), max(least + more, 1)
        steps = self.pool.lease(session, least, want)
        try:
            count = self.naive.lease(session, least, want)
        except DoesNotFit:
            with pytest.raises(PoolExhausted):
                finish(steps)
            return
        assert len(self.take(session, finish(steps))) == count

    @rule(which=WHICH, place=WHICH, contents=CONTENTS, namespace=NAMESPACES)
    def commit_blocks(self, which: int, place: int, contents: list[tuple[int, int]], namespace: str) -> None:
        session = self.session_of(which)
        kept = self.kept.get(session, {})
        leased = [block for block, one in kept.items() if one.path is None]
        contents = contents[: len(leased)]
        if not contents:
            return
        known = [block for block, one in kept.items() if one.path is not None]
        choice = place % (len(known) + 2) - 2
        behind = kept[known[choice]].path if choice >= 0 else None
        parent = self.run_of(session, [known[choice]] if choice >= 0 else [])
        namespace = namespace if behind is None else behind[0]
        chunks: tuple[object, ...] = () if behind is None else behind[1]
        blocks = leased[: len(contents)]
        run = self.run_of(session, blocks)
        paths: list[Path] = []
        for block, content in zip(blocks, contents, strict=True):
            chunks += (content,)
            paths.append((namespace, chunks))  # type: ignore[arg-type]
            self.memory[block] = self.stamp_of(paths[-1])
        steps = self.pool.commit_blocks(session, parent, run, chain_of(namespace, contents))
        expected = self.naive.commit_blocks(session, behind, namespace, contents)  # type: ignore[arg-type]
        shadows = finish(steps)
        assert [one.position for one in shadows] == expected
        for shadow in shadows:
            self.read_block(shadow.block_id, paths[shadow.position])
        for position, block in enumerate(blocks):
            kept[block].path, kept[block].is_shadow = paths[position], position in expected

    @rule(which=WHICH, places=st.lists(WHICH, min_size=1, max_size=8))
    def release_blocks(self, which: int, places: list[int]) -> None:
        session = self.session_of(which)
        kept = self.kept.get(session, {})
        if not kept:
            return
        blocks = list(dict.fromkeys(list(kept)[place % len(kept)] for place in places))
        run = self.run_of(session, blocks)
        for block in blocks:
            one = kept.pop(block)
            if one.path is None:
                self.naive.release_leased(session)
            elif one.is_shadow:
                self.naive.release_shadow(session, one.path)
            else:
                self.naive.release_held(session, one.path)
        assert finish(self.pool.release_blocks(session, run)) == len(blocks)
        assert finish(self.pool.release_blocks(session, run)) == 0

    @rule(which=WHICH, place=WHICH)
    def invalidate(self, which: int, place: int) -> None:
        session = self.session_of(which)
        kept = self.kept.get(session, {})
        committed = [block for block, one in kept.items() if one.path is not None and not one.is_shadow]
        if not committed:
            return
        block = committed[place % len(committed)]
        path = kept[block].path
        assert path is not None
        steps = self.pool.invalidate(session, block, kept[block].generation)
        try:
            count = self.naive.invalidate(session, path)
        except HeldByOthers:
            with pytest.raises(BlockHeld):
                finish(steps)
            return
        done = finish(steps)
        assert len(done.leased) == len(done.before) == count
        self.take(session, done.leased)

    def forget(self, session: int) -> None:
        self.kept.pop(session, None)
        self.naive.quiet(session)

    @invariant()
    def agrees_with_holdings(self) -> None:
        for session in self.sessions:
            own, holding = self.naive.of(session), self.pool.holding(session)
            assert (holding.held_block_count, holding.leased_block_count) == (len(own.held), own.leased)
            for block, one in self.kept.get(session, {}).items():
                if one.path is not None:
                    self.read_block(block, one.path)


BlockMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("KVHARBOR_MODEL_EXAMPLES", "150")),
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
)
TestBlocksAgainstNaiveModel = pytest.mark.timeout(600)(pytest.mark.slow(BlockMachine.TestCase))
