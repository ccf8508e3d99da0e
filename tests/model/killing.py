"""A service process that is killed after every single store it makes, and the one that comes after it."""

import random
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from actions import ACTIONS, config
from crossing import Crossing
from interleaving import encode
from journal import Journal, WatchedMemory, watch
from workers import Harbour, Reader, Stamp, extra_keys

from kvharbor.pool import POLICIES, BlockRun, Held, Ledger, Pool, PoolConfig, Prompt, ledger_bytes
from kvharbor.pool.steps import finish

FIRST_NUMBER, FIRST_REVISION = 1 << 40 | 1, 1 << 40


@dataclass(frozen=True)
class Known:
    """One sequence as its client knows it at the moment of the kill."""

    session: int
    held: Held
    expected: tuple[Stamp, ...]


@dataclass(frozen=True)
class Kept:
    """What one session knows at that moment of the blocks that it holds by itself: all but the uncertain are there."""

    session: int
    blocks: BlockRun
    expected: dict[int, Stamp]
    uncertain: frozenset[int]


@dataclass(frozen=True)
class Index:
    """The committed blocks with their generations, which of them may go by a retirement, and all generations."""

    blocks: frozenset[tuple[int, int]]
    doomed: frozenset[tuple[int, int]]
    generations: tuple[int, ...]


def index_of(pool: Pool) -> Index:
    state = pool._state
    generation, refs = state.blocks.generation, state.blocks.refs
    committed = [block for block in range(len(generation)) if state.tree.contains(block)]
    doomed = [block for block in committed if state.tree.namespace_of(block).is_retired and not refs[block]]
    kept, going = [frozenset((block, generation[block]) for block in blocks) for blocks in (committed, doomed)]
    return Index(kept, going, tuple(generation))


class Killing(Crossing):
    """All that may happen to a pool; `check_kills` then kills it after every store of what has happened since."""

    def __init__(self, config: PoolConfig) -> None:
        self.buffer = bytearray(ledger_bytes(config))
        self.journal = Journal(self.buffer, lambda: None)
        ledger = Ledger.create(config, self.buffer)
        super().__init__(config, ledger)
        self.config = config
        self.journal = Journal(self.buffer, lambda: (self.knowledge(), list(self.pool._state.blocks.evictable)))
        self.harbour.memory = WatchedMemory(self.journal)
        watch(ledger, self.journal)
        self.index = index_of(self.pool)
        self.journal.clear({})
        self.kill_count = 0

    def knowledge(self) -> list[Known | Kept]:
        """What each client that may call knows of its sequences, and of what it holds itself."""
        found: list[Known | Kept] = []
        for worker in self.harbour.workers:
            owner = self.pool._state.sessions.get(worker.session)
            if owner is None or worker.is_lost:
                continue
            expected = {block: own.stamp for block, own in worker.own.items() if own.stamp is not None}
            found.append(Kept(worker.session, self.run(worker, worker.own), expected, frozenset(worker.uncertain)))
            for reader in worker.readers.values():
                live = owner.sequences.get(reader.number)
                if live is not None:
                    # A reply may be lost: the client may know of less that is committed, never of more.
                    known_blocks = live.committed_blocks - (len(self.journal) % 3 if live.committed_blocks > 2 else 0)
                    found.append(Known(worker.session, self._held(reader, live, known_blocks), self._stamps(reader)))
        return found

    def _held(self, reader: Reader, live: Any, known_blocks: int) -> Held:
        first = known_blocks * self.block_tokens
        return Held(
            number=reader.number,
            block_ids=array("I", reader.table),
            generations=array("Q", [self.pool._state.blocks.generation[block] for block in reader.table]),
            cached_tokens=live.cached_tokens,
            computed_tokens=reader.computed,
            token_count=len(reader.tokens),
            committed_tokens=first,
            tail_token_ids=encode(reader.tokens[first:]),
            extra_keys=extra_keys(reader.extras, first),
            salt=reader.namespace[3],
            request_id=reader.request_id,
            group=reader.group,
            pin_name="" if live.pin is None else live.pin.name,
        )

    def _stamps(self, reader: Reader) -> tuple[Stamp, ...]:
        blocks = -(-reader.computed // self.block_tokens)
        return tuple(reader.stamp(position, self.block_tokens) for position in range(blocks))

    def check_kills(self) -> None:
        """Kills after each store since the last time, and recovers."""
        before, self.index = self.index, index_of(self.pool)
        sessions = {number: owner.tenant for number, owner in self.pool._state.sessions.items() if not owner.quiet}
        lost = {worker.session for worker in self.harbour.workers if worker.is_lost}
        for image, memory, (known, cached) in self.journal.prefixes():
            self.kill_count += 1
            successor = Successor(self.config, image, sessions, memory)
            successor.check_index(before, self.index, self.harbour.published)
            successor.check_order(cached)
            resuming = [one for one in known if one.session not in lost]
            if self.kill_count % 5 == 0:
                successor.check_killed_again()
            if self.kill_count % 40 == 0:
                successor.check_killed_while_resuming(resuming, lost)
            successor.check_sessions(resuming, lost)
        self.journal.clear(self.harbour.memory)


class Successor:
    """The process after the kill."""

    def __init__(
        self, config: PoolConfig, image: bytearray, sessions: Mapping[int, str], memory: dict[int, Stamp]
    ) -> None:
        self.config, self.sessions, self.memory = config, sessions, memory
        self.first_image, self.image = bytes(image), image
        self.pool = self._recovered(image)

    def _recovered(self, image: bytearray, journal: Journal | None = None) -> Pool:
        ledger = Ledger.open(self.config, image)
        if journal is not None:
            watch(ledger, journal)
        return Pool.recovered(
            self.config, ledger, self.sessions, first_number=FIRST_NUMBER, first_revision=FIRST_REVISION
        )

    def check_index(self, before: Index, after: Index, published: dict[tuple[int, int], Stamp]) -> None:
        """Nothing committed is lost, wrong or from nowhere; generations go on."""
        self.pool.check_invariants()
        found = index_of(self.pool)
        assert self.pool.recovered_from is not None
        assert self.pool.recovered_from.torn_block_count == 0, "[L2] a word was there before its record"
        kept = (before.blocks & after.blocks) - before.doomed - after.doomed
        assert kept <= found.blocks, "[G7] a committed block is lost"
        assert found.blocks <= before.blocks | after.blocks, "[G1] a block from nowhere"
        self.check_bytes(published)
        assert all(now >= then for now, then in zip(found.generations, before.generations, strict=True)), "[L6]"

    def check_order(self, cached: list[int]) -> None:
        """What was cached at the moment of the kill, and is, is in the same order, where the policy is that of L3."""
        if self.config.policy != "lru":
            return
        found = [block for block in self.pool._state.blocks.evictable if block in set(cached)]
        assert found == [block for block in cached if block in set(found)], "[L3] the order of release is lost"

    def check_bytes(self, published: dict[tuple[int, int], Stamp]) -> None:
        """Each block in the index holds what its record says, and what its generation has always named."""
        harbour = Harbour(self.pool)
        for block, generation in index_of(self.pool).blocks:
            stamp = harbour._stamp_of(block)
            assert self.memory[block] == stamp, "[G1] a block holds other bytes than its record says"
            assert published.get((block, generation), stamp) == stamp, "[P3] a generation has named two contents"

    def check_killed_again(self) -> None:
        """A recovery that is killed after any of its stores is recovered from as well."""
        expected = index_of(self.pool).blocks
        image = bytearray(self.first_image)
        journal = Journal(image, lambda: None)
        self._recovered(image, journal)
        for half_done, _, _ in journal.prefixes():
            again = self._recovered(half_done)
            again.check_invariants()
            assert index_of(again).blocks == expected

    def check_killed_while_resuming(self, known: list[Known | Kept], lost: set[int]) -> None:
        """[L12] A kill after any store of the sessions' return: each resumes once more, as it was before."""
        image = bytearray(self.first_image)
        journal = Journal(image, lambda: None)
        pool = self._recovered(image, journal)
        journal.clear(self.memory)
        for one in known:
            if isinstance(one, Kept):
                finish(pool.resume_blocks(one.session, one.blocks))
            else:
                finish(pool.resume(one.session, one.held))
        for session in self.sessions:
            if session not in lost:
                finish(pool.finish_resume(session))
        for half_done, memory, _ in journal.prefixes():
            Successor(self.config, half_done, self.sessions, memory).check_sessions(known, lost)

    def check_sessions(self, known: list[Known | Kept], lost: set[int]) -> None:
        """Others fill all room, then each session resumes and reads what it has; then everything is given back."""
        pool = self.pool
        hog = max(self.sessions, default=0) + 1
        pool.open_session(hog, "hog")
        if room := pool.available_block_count:
            tokens = encode([9] * (room * self.config.block_tokens))
            view = finish(pool.allocate(hog, Prompt(tokens), max_cached_tokens=0))
            self.memory |= dict.fromkeys(view.block_ids, ("hog",))
        pool.check_invariants()
        for one in known:
            if isinstance(one, Kept):
                self._resume_blocks(one)
            else:
                self._resume(one)
        for session in self.sessions:
            if session not in lost:
                finish(pool.finish_resume(session))
                assert pool._state.sessions[session].unclaimed == set()
                pool.check_invariants()
        for session in [*lost.intersection(self.sessions), *self.sessions.keys() - lost]:
            finish(pool.end_session(session))
            pool.check_invariants()
            finish(pool.writers_quiet(session))
            assert pool.holding(session).private_block_count == 0
            pool.check_invariants()
            finish(pool.session_quiet(session))
            pool.check_invariants()
        finish(pool.session_quiet(hog))
        finish(pool.expire(1e9))
        for tenant, name in list(pool._state.pins):
            finish(pool.unwarm(tenant, name))
        finish(pool.evict_unheld())
        pool.check_invariants()
        stats = pool.stats()
        assert stats.free_block_count == stats.total_block_count, "blocks are leaked"
        assert (len(pool._state.namespaces), pool._state.sessions, pool._state.recovery) == (0, {}, None)
        assert list(pool._state.ledger.cells.entries()) == [], "cells are leaked"

    def _resume(self, one: Known) -> None:
        held = one.held
        resumed = finish(self.pool.resume(one.session, held))
        self.pool.check_invariants()
        view = resumed.view
        assert (view.number, list(view.block_ids)) == (held.number, list(held.block_ids))
        assert list(view.generations) == list(held.generations)
        assert (view.computed_tokens, view.token_count) == (held.computed_tokens, held.token_count)
        assert held.committed_tokens <= resumed.committed_tokens <= held.computed_tokens
        found = tuple(self.memory[block] for block in view.block_ids[: len(one.expected)])
        assert found == one.expected, "[G3] a block was reused while a session held it"
        again = finish(self.pool.resume(one.session, held))
        assert (again.view, again.committed_tokens) == (view, resumed.committed_tokens)

    def _resume_blocks(self, one: Kept) -> None:
        """Each block that is still its own is there as it was, at the first time and again."""
        lost = finish(self.pool.resume_blocks(one.session, one.blocks))
        self.pool.check_invariants()
        gone = set(lost.block_ids)
        assert gone <= one.uncertain, "[B7] a block that a session held is lost"
        owner = self.pool._state.sessions[one.session].blocks
        named = set(one.blocks.block_ids) - gone
        assert named == owner.leased | owner.shadows | (owner.behind.keys() - owner.lingering), "[B7]"
        for block in named & one.expected.keys():
            assert self.memory[block] == one.expected[block], "[G3] a block was reused while a session held it"
        assert finish(self.pool.resume_blocks(one.session, one.blocks)) == lost


def walk(seed: int, steps: int) -> Killing:
    """Takes a walk of chance, with a kill after each store of each step."""
    chance = random.Random(seed)
    shape = chance.choice([24, 12]), chance.choice([1, 2]), chance.choice([0, 0, 4])
    world = Killing(config(*shape, POLICIES[seed % len(POLICIES)]))
    for _ in range(steps):
        ready = [action for action in ACTIONS if action.ready(world)]
        action = chance.choices(ready, [one.weight for one in ready])[0]
        chosen = {name: chance.choice(options) for name, options in action.options.items()}
        getattr(world, action.name)(**chosen)
        world.check_kills()
    return world
