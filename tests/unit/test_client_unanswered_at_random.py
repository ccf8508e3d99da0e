"""Commits and extends whose answers are lost, and restarts, at random: what is told of them, to the real pool [C11].

No sequence is lost by it, and tokens count once: the pool has of each just what a list of tokens says.
"""

import contextlib
import itertools
from array import array
from typing import Any

from calls import encode
from hypothesis import given
from hypothesis import strategies as st
from restarts import Restarts

from kvharbor.client import Commit, CommitResult, CursorOutOfRange, DeadlineExceeded, ExtraKey, HarborError
from kvharbor.client.batches import CommitBatch, ExtendBatch, Repeats
from kvharbor.client.calls import PoolCalls
from kvharbor.client.sequence_state import SequenceState
from kvharbor.client.tail import Tail
from kvharbor.pool import ExtraKey as PoolKey
from kvharbor.pool import Prompt
from kvharbor.pool.errors import PoolError
from kvharbor.pool.steps import finish
from kvharbor.server.messages.status import item_status
from kvharbor.server.messages.wire import commit_of, held_of, sequence_message, shadow_message
from kvharbor.v1 import cache_service_pb2 as cache
from kvharbor.v1 import types_pb2

CALLS = PoolCalls("e.1")
TOO_MANY = 100
FATES = ("lost", "lost before", "lost half", "killed", "restart", "restart before", "restart half", "twice", "here")
Commits = list[Commit[SequenceState]]
fates = st.lists(st.sampled_from(FATES), max_size=3)
steps = st.tuples(
    st.sampled_from(["commit", "commit", "both", "brim", "beyond", "extend", "extend", "switch", "restart"]),
    st.integers(0, 2),
    st.integers(0, 6),
    st.integers(0, 7),
    st.booleans(),
    st.tuples(fates, fates),
)


class Listed:
    """A sequence, and its tokens and keys with those of an unanswered commit."""

    def __init__(self, restarts: Restarts, token_count: int) -> None:
        asked = cache.AllocateRequest(token_ids=encode(range(token_count)))
        view = finish(restarts.pool.allocate(1, Prompt(asked.token_ids), reserve_tokens=20))
        message = sequence_message(view, "")
        self.state = SequenceState(message, 4, Tail.of_prompt(asked, message))
        self.tokens, self.keys = [*range(token_count)], list[ExtraKey]()

    def count_of(self, what: str, new_count: int) -> int:
        """Returns how many tokens a commit is to add: up to the brim of the table, or more by `new_count`."""
        left = self.state.capacity_tokens - len(self.tokens)
        return {"beyond": TOO_MANY, "brim": max(left, 0) + new_count}.get(what, new_count)

    def commit(self, new_count: int, lag: int, keyed: bool) -> Commit[SequenceState]:
        """Returns one that carries what is in doubt."""
        state, doubt = self.state, self.state.unanswered
        self.tokens += range(len(self.tokens), len(self.tokens) + new_count)
        if keyed and new_count:
            self.keys.append(ExtraKey(len(self.tokens) - 1, b"k"))
        least = state.computed_tokens if doubt is None else doubt.computed_tokens
        keys = [key for key in self.keys if key.token_offset >= state.token_count]
        return Commit(state, max(least, len(self.tokens) - lag), array("I", self.tokens[state.token_count :]), keys)

    def settle(self) -> None:
        """Forgets what was refused."""
        doubt = self.state.unanswered
        count = self.state.token_count + (0 if doubt is None else len(doubt.new_token_ids) // 4)
        self.tokens = self.tokens[:count]
        self.keys = [key for key in self.keys if key.token_offset < count]


class World:
    """A session's sequences, which go on alike so that one's blocks are the others' shadows, and its service."""

    def __init__(self, slice_blocks: int) -> None:
        self.restarts = Restarts(64, slice_blocks)
        self.listed = [Listed(self.restarts, token_count) for token_count in (6, 6, 5)]

    def restart(self, count: int = 1) -> None:
        """The last of so many processes is told everything, the others have ended before they took it in."""
        for _ in range(count):
            self.restarts.restart()
            told = [(each.state, each.state.held()) for each in self.listed]
        for state, message in told:
            resumed = self.restarts.resume(1, held_of(message, int(state.id)))
            shadows = [shadow_message(shadow) for shadow in resumed.shadows]
            state.resumed(cache.ResumeResult(committed_tokens=resumed.committed_tokens, shadows=shadows))
        self.restarts.finish_resume(1, 2, 3)

    def commit(self, commits: Commits, first: list[str], second: list[str]) -> list[CommitResult | HarborError]:
        """As a pool of the client does it; `first` and `second` are what becomes of the two calls."""
        repeats = Repeats(CALLS, commits)
        if repeats.batch is not None:
            self._run(repeats.batch, first)
        return self._run(CommitBatch.of(CALLS, repeats.rest()), second)

    def extend(self, one: Listed, token_count: int, fates: list[str]) -> None:
        """As a pool of the client does it."""
        batch = ExtendBatch(CALLS, [(one.state, token_count)])
        with batch.answered():
            for fate in itertools.chain(fates, ["answered"]):
                results = [] if "before" in fate else [self._extended(item) for item in batch.call.request.items]  # type: ignore[attr-defined]
                if "lost" in fate:
                    raise DeadlineExceeded("no answer")
                if fate == "killed":
                    raise KeyboardInterrupt
                if fate != "answered":
                    self.restart(2 if fate == "twice" else 1)
        assert batch.outcomes(cache.ExtendResponse(results=results)) == [None]

    def _extended(self, item: cache.ExtendItem) -> cache.ExtendResult:
        known = item.known_block_count
        added = finish(self.restarts.pool.extend(1, int(item.sequence_id), item.capacity_tokens, known))
        table = types_pb2.BlockTable(
            block_ids=encode(added.block_ids), generations=array("Q", added.generations).tobytes()
        )
        return cache.ExtendResult(added=table, capacity_tokens=added.capacity_tokens)

    def _run(self, batch: CommitBatch, fates: list[str]) -> list[CommitResult | HarborError]:
        if batch.is_empty:
            return batch.here()
        items: Any = batch.call.request.items  # type: ignore[attr-defined]
        with batch.answered():
            for fate in itertools.chain(fates, ["answered"]):
                if fate == "here":
                    outcomes = batch.here()
                    self.restart()
                    return outcomes
                batch.sending()
                count = 0 if "before" in fate else 1 if "half" in fate else len(items)
                results = [self._effect(item) for item in items[:count]]
                if "lost" in fate:
                    raise DeadlineExceeded("no answer")
                if fate == "killed":
                    raise KeyboardInterrupt
                if fate != "answered":
                    self.restart(2 if fate == "twice" else 1)
        return batch.outcomes(cache.CommitResponse(results=results))

    def _effect(self, item: cache.CommitItem) -> cache.CommitResult:
        try:
            done = finish(self.restarts.pool.commit(1, int(item.sequence_id), commit_of(item)))
        except PoolError as refused:
            return cache.CommitResult(status=item_status(refused))
        shadows = [shadow_message(shadow) for shadow in done.shadows]
        return cache.CommitResult(committed_tokens=done.committed_tokens, shadows=shadows)

    def check(self) -> None:
        """What nobody doubts is the same here, in the pool, and in the lists."""
        pool = self.restarts.pool
        pool.check_invariants()
        for each in self.listed:
            state, committed = each.state, each.state.tail.committed_tokens
            if state.unanswered is not None:
                continue
            known = pool._state.sequence(1, int(state.id))
            assert len(known.table) == len(state.table) or (state.outgrown and len(known.table) > len(state.table))
            assert state.token_count == known.token_count == len(each.tokens)
            assert (state.computed_tokens, committed) == (known.computed_tokens, 4 * known.committed_blocks)
            assert bytes(known.tail) == bytes(state.tail.token_ids) == encode(each.tokens[committed:])
            keys = tuple(PoolKey(key.token_offset, key.value) for key in each.keys)
            there = finish(pool.lookup("t", Prompt(encode([*each.tokens, TOO_MANY]), keys), None))
            assert there.present_tokens >= committed


@given(st.lists(steps, max_size=14), st.sampled_from([1, 512]))
def test_tokens_count_once_whatever_is_lost(script: list[Any], slice_blocks: int) -> None:
    world = World(slice_blocks)
    for what, number, new_count, lag, keyed, becomes in script:
        if what == "switch":
            world.listed[number].state.switch_shadows()
        elif what == "restart":
            world.restart()
        elif what == "extend":
            with contextlib.suppress(DeadlineExceeded, KeyboardInterrupt):
                world.extend(world.listed[number], new_count, becomes[0])
        else:
            chosen = [world.listed[number], world.listed[number - 1]][: 2 if what == "both" else 1]
            commits = [each.commit(each.count_of(what, new_count), lag, keyed) for each in chosen]
            try:
                outcomes = world.commit(commits, *becomes)
            except (DeadlineExceeded, KeyboardInterrupt):
                outcomes = []
            for each, outcome in zip(chosen, outcomes, strict=False):
                fits = len(each.tokens) <= each.state.capacity_tokens
                assert isinstance(outcome, CommitResult if fits else CursorOutOfRange)
                assert each.state.token_count == len(each.tokens) or not fits
            for each in chosen:
                each.settle()
        world.check()
