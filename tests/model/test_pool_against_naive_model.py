"""The pool and a naive model are driven by the same random calls and must agree on everything visible."""

import os
from array import array

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule
from naive import SEQUENCE_ENTRIES, DoesNotFit, NaivePool, NaiveSequence, Path, TooManyEntries

from kvharbor.pool import Commit, Pool, PoolConfig, Prompt, SequenceView
from kvharbor.pool.errors import PoolExhausted, RequestTooLarge, TablesFull, WarmBudgetExceeded
from kvharbor.pool.namespaces import FIRST_ROOT
from kvharbor.pool.steps import finish

BLOCKS, BLOCK_TOKENS = 12, 2
# Few enough to be met often; two sessions can still fill the pool.
MOST_ENTRIES = 3 * SEQUENCE_ENTRIES + BLOCKS // 2
REFUSALS = {DoesNotFit: PoolExhausted, TooManyEntries: TablesFull}
# Two token values make shared prefixes, and so matches, shadows and races, the common case.
TOKENS = st.lists(st.integers(1, 2), min_size=1, max_size=9)
# Version and salt.
NAMESPACES = st.sampled_from(["", "a", "a/s"])


def encode(tokens: list[int]) -> bytes:
    return array("I", tokens).tobytes()


def prompt_of(tokens: list[int], namespace: str) -> Prompt:
    version, _, salt = namespace.partition("/")
    return Prompt(encode(tokens), version=version, salt=salt.encode())


class Live:
    """One sequence in both worlds."""

    def __init__(self, number: int, naive: NaiveSequence, table: list[int]) -> None:
        self.number = number
        self.naive = naive
        self.table = table
        self.is_live = True

    @property
    def session(self) -> int:
        return self.naive.session


class PoolMachine(RuleBasedStateMachine):
    """[G1] to [G5] and [P1] to [P8] after every call; `memory` plays the KV bytes."""

    live = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        config = PoolConfig(BLOCKS, BLOCK_TOKENS, scratch_blocks=1, warm_budget_ratio=0.5, slice_blocks=2)
        self.pool = Pool(config)
        self.naive = NaivePool(BLOCKS, BLOCK_TOKENS, MOST_ENTRIES)
        self.pool._state.most_entries = MOST_ENTRIES
        self.memory: dict[int, object] = {}
        self.sessions: list[int] = []
        self.lost: list[int] = []
        self.lives: list[Live] = []
        self.handoff_count = 0
        for _ in range(2):
            self.start_session()

    def take_in(self, view: SequenceView, naive: NaiveSequence) -> Live:
        one = Live(view.number, naive, list(view.block_ids))
        self.lives.append(one)
        self.read(one)
        return one

    def start_session(self) -> int:
        session = len(self.sessions) + len(self.lost) + 1
        self.pool.open_session(session, "tenant")
        self.sessions.append(session)
        return session

    # The bytes: a worker stamps what it computes with everything that the content depends on.

    def stamp(self, naive: NaiveSequence, position: int) -> object:
        end = min((position + 1) * BLOCK_TOKENS, naive.computed)
        return (naive.namespace, tuple(naive.tokens[:end]))

    def write(self, one: Live, before: int) -> None:
        for position in range(before // BLOCK_TOKENS, -(-one.naive.computed // BLOCK_TOKENS)):
            self.memory[one.table[position]] = self.stamp(one.naive, position)

    def read(self, one: Live) -> None:
        for position in range(-(-one.naive.computed // BLOCK_TOKENS)):
            assert self.memory[one.table[position]] == self.stamp(one.naive, position), "G1: wrong bytes"

    @rule(
        target=live,
        which=st.integers(0, 9),
        tokens=TOKENS,
        reserve=st.integers(0, 4),
        limit=st.one_of(st.none(), st.integers(0, 9)),
        namespace=NAMESPACES,
    )
    def allocate(self, which: int, tokens: list[int], reserve: int, limit: int | None, namespace: str) -> object:
        session = self.sessions[which % len(self.sessions)]
        limit = None if limit is None else min(limit, len(tokens))
        steps = self.pool.allocate(
            session,
            prompt_of(tokens, namespace),
            reserve_tokens=reserve,
            max_cached_tokens=limit,
        )
        max_cached = len(tokens) - 1 if limit is None else limit
        try:
            naive = self.naive.allocate(session, namespace, tokens, reserve, max_cached)
        except (DoesNotFit, TooManyEntries) as refused:
            if isinstance(refused, DoesNotFit):
                self.rematch_recency(namespace, tokens, max_cached)
            with pytest.raises(REFUSALS[type(refused)]):
                finish(steps)
            return multiple()
        view = finish(steps)
        assert view.cached_tokens == naive.cached
        return self.take_in(view, naive)

    def rematch_recency(self, namespace: str, tokens: list[int], max_cached: int) -> None:
        """A refused prompt longer than a slice has held, and so refreshed, its full leading slices."""
        matched = min(self.naive.present(namespace, tokens), max_cached // BLOCK_TOKENS)
        limit = max_cached // BLOCK_TOKENS
        probe = NaiveSequence(0, namespace, list(tokens), 0, 0, 0, 0)
        sliced = 0
        while sliced + 2 <= matched and sliced + 2 < limit:
            sliced += 2
        paths = [self.naive.path(probe, block) for block in range(sliced)]
        for path in paths:
            self.naive.hold(path)
        for path in reversed(paths):
            self.naive.unhold(path)

    @rule(one=live, more=st.integers(0, 5))
    def extend(self, one: Live, more: int) -> None:
        if not one.is_live:
            return
        capacity = len(one.naive.tokens) + more
        steps = self.pool.extend(one.session, one.number, capacity)
        try:
            self.naive.extend(one.naive, capacity)
        except (DoesNotFit, TooManyEntries) as refused:
            with pytest.raises(REFUSALS[type(refused)]):
                finish(steps)
            return
        one.table += finish(steps).block_ids

    @rule(one=live, new=st.lists(st.integers(1, 2), max_size=3), keep=st.integers(0, 3))
    def compute_and_commit(self, one: Live, new: list[int], keep: int) -> None:
        if not one.is_live:
            return
        new = new[: one.naive.block_count * BLOCK_TOKENS - len(one.naive.tokens)]
        before = one.naive.computed
        computed = max(before, len(one.naive.tokens) + len(new) - keep)
        shadows = self.naive.commit(one.naive, computed, new)
        self.write(one, before)
        done = finish(
            self.pool.commit(one.session, one.number, Commit(computed, encode(new), written=self.written(one, before)))
        )
        assert done.committed_tokens == one.naive.committed * BLOCK_TOKENS
        assert [shadow.position for shadow in done.shadows] == shadows
        self.read(one)

    def written(self, one: Live, before: int) -> "tuple[array[int], array[int]]":
        end = -(-one.naive.computed // BLOCK_TOKENS)
        first = before // BLOCK_TOKENS if one.naive.computed > before else end
        blocks = one.table[first:end]
        generation = self.pool._state.blocks.generation
        return array("I", blocks), array("Q", [generation[block] for block in blocks])

    @rule(one=live)
    def switch_shadows(self, one: Live) -> None:
        if not one.is_live:
            return
        canonical = self.pool._state.blocks.canonical
        positions = tuple(sorted(one.naive.shadows))
        for position in positions:
            one.table[position] = canonical[one.table[position]]
        self.naive.switch(one.naive)
        finish(self.pool.commit(one.session, one.number, Commit(one.naive.computed, switched=positions)))
        self.read(one)

    @rule(target=live, one=live, child_count=st.integers(1, 2), reserve=st.integers(0, 2), fails=st.booleans())
    def fork(self, one: Live, child_count: int, reserve: int, fails: bool) -> object:
        if not one.is_live:
            return multiple()
        steps = self.pool.fork(one.session, one.number, child_count, reserve_tokens=reserve)
        try:
            children = self.naive.fork(one.naive, child_count, reserve)
        except (DoesNotFit, TooManyEntries) as refused:
            with pytest.raises((REFUSALS[type(refused)], RequestTooLarge)):
                finish(steps)
            return multiple()
        made = finish(steps)
        if fails:
            self.pool.abort_fork(made)
            for child in reversed(children):
                self.naive.release(child)
            return multiple()
        for source, destination in made.copies:
            self.memory[destination] = self.memory[source]
        views = self.pool.finish_fork(made)
        lives = [self.take_in(view, child) for view, child in zip(views, children, strict=True)]
        return multiple(*lives)

    @rule(one=consumes(live), again=st.booleans())
    def release(self, one: Live, again: bool) -> None:
        if not one.is_live:
            return
        one.is_live = False
        self.naive.release(one.naive)
        assert finish(self.pool.release(one.session, one.number)) == 1
        if again:
            assert finish(self.pool.release(one.session, one.number)) == 0

    @rule(target=live, one=consumes(live), which=st.integers(0, 9))
    def hand_over(self, one: Live, which: int) -> object:
        if not one.is_live:
            return multiple()
        self.handoff_count += 1
        token = f"token-{self.handoff_count}"
        asked = Commit(one.naive.computed)
        finish(self.pool.handoff(one.session, one.number, asked, token=token, expires_at=1e9))
        self.pool.check_invariants()
        session = self.sessions[which % len(self.sessions)]
        try:
            self.naive.adopt(one.naive, session)
        except TooManyEntries:
            with pytest.raises(TablesFull):
                self.pool.adopt(session, token)
            # It may still be adopted, and counts for its giver until it is.
            session = one.session
            self.naive.adopt(one.naive, session)
        view = self.pool.adopt(session, token).view
        one.is_live = False
        assert view.computed_tokens == one.naive.computed
        assert list(view.block_ids) == one.table
        return self.take_in(view, one.naive)

    @rule(which=st.integers(0, 9))
    def lose_session(self, which: int) -> None:
        session = self.sessions.pop(which % len(self.sessions))
        self.lost.append(session)
        for one in self.lives:
            one.is_live = one.is_live and one.session != session
        finish(self.pool.end_session(session))
        self.naive.lose(session)
        self.start_session()

    @rule()
    def prove_quiet(self) -> None:
        lost = [session for session in self.lost if session in self.pool._state.sessions]
        for session in lost:
            # The pool goes through a session's sequences in order of their numbers.
            for one in [naive for naive in self.naive.lost if naive.session == session]:
                self.naive.release(one)
            self.forget(session)
            finish(self.pool.session_quiet(session))

    def forget(self, session: int) -> None:
        """What else goes with a session, for machines that know of more."""

    @rule(tokens=TOKENS, namespace=NAMESPACES, name=st.sampled_from(["x", "y"]))
    def pin(self, tokens: list[int], namespace: str, name: str) -> None:
        if len(tokens) < BLOCK_TOKENS:
            return
        steps = self.pool.warmup("tenant", None, prompt_of(tokens, namespace), name)
        self.naive.retired.discard(namespace)
        matched = self.naive.present(namespace, tokens)
        probe = NaiveSequence(0, namespace, list(tokens), 0, 0, 0, 0)
        paths = {self.naive.path(probe, block) for block in range(matched)}
        others = {path for other, held in self.naive.pins.items() if other != name for path in held}
        if len(paths | others) > BLOCKS // 2:
            self.rematch_recency(namespace, tokens, len(tokens))
            with pytest.raises(WarmBudgetExceeded):
                finish(steps)
            return
        self.naive.pin_present(name, namespace, tokens)
        assert finish(steps).pinned_tokens == matched * BLOCK_TOKENS

    @rule(name=st.sampled_from(["x", "y"]))
    def unpin(self, name: str) -> None:
        if name in self.naive.pins:
            self.naive.unpin(name)
            finish(self.pool.unwarm("tenant", name))

    @rule(tokens=TOKENS, namespace=NAMESPACES)
    def lookup(self, tokens: list[int], namespace: str) -> None:
        presence = finish(self.pool.lookup("tenant", prompt_of(tokens, namespace)))
        assert presence.present_tokens == self.naive.present(namespace, tokens) * BLOCK_TOKENS

    @rule(version=st.sampled_from(["", "a"]))
    def retire(self, version: str) -> None:
        finish(self.pool.retire_version("tenant", version))
        self.naive.retire({"a", "a/s"} if version else {""})

    @rule()
    def evict_everything_unheld(self) -> None:
        assert finish(self.pool.evict_unheld()) == self.naive.evict_all()

    @invariant()
    def agrees_with_the_model(self) -> None:
        stats = self.pool.stats()
        assert {
            "free": stats.free_block_count,
            "reserved": stats.reserved_block_count,
            "active": stats.active_block_count,
            "warm": stats.warm_block_count,
            "cached": stats.cached_block_count,
            "quarantined": stats.quarantined_block_count,
            "shared": stats.shared_block_count,
        } == self.naive.counts()
        assert stats.counters.evicted_block_count == self.naive.evicted

    @invariant()
    def keeps_its_invariants(self) -> None:
        self.pool.check_invariants()

    @invariant()
    def evicts_in_the_order_of_release(self) -> None:
        assert [self.path_of(block) for block in self.pool._state.blocks.evictable] == self.naive.release_order

    def path_of(self, block: int) -> Path:
        tree, chunks = self.pool._state.tree, []
        node = block
        while node < FIRST_ROOT:
            chunks.append(tuple(array("I", tree.content_of(node))))
            node = tree.parent[node]
        _, version, _, salt, _ = tree.namespace_of(block).key
        return version + "/" * bool(salt) + salt.decode(), tuple(reversed(chunks))


PoolMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("KVHARBOR_MODEL_EXAMPLES", "150")),
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
)
TestPoolAgainstNaiveModel = pytest.mark.slow(PoolMachine.TestCase)
