"""Who computes what, and who waits for it: the pool and the naive model must agree, whatever else happens."""

import os
import random
from collections import Counter
from dataclasses import dataclass

import pytest
from naive import DoesNotFit, NaiveSequence
from naive_marks import NaiveMarks
from test_pool_against_naive_model import BLOCK_TOKENS, BLOCKS, Live, encode
from test_pool_blocks_against_naive_model import BlockMachine

from kvharbor.pool import Acquired, Awaited, Chain, Outlook, Prompt, SequenceView
from kvharbor.pool.errors import PoolExhausted
from kvharbor.pool.namespaces import FIRST_ROOT
from kvharbor.pool.steps import finish
from kvharbor.pool.writers import LONGEST_STEP_S, PATIENCE_S


@dataclass(eq=False)
class Waiting:
    """A request that waits, in both worlds."""

    session: int
    tokens: list[int]
    limit: int
    awaited: Awaited


# A few families of prompts that begin alike, so that whoever asks is often not the only one.
PROMPTS = [[first] * length + end for first in (1, 2, 3) for length in (3, 5, 8) for end in ([], [4], [5, 5])]
WALKS = int(os.environ.get("KVHARBOR_MODEL_EXAMPLES", "60")) // 4


class Flights(BlockMachine):
    """[W1] to [W8], [B6] and [B8] after every call of a walk of chance; what other calls do is the other tests'."""

    naive: NaiveMarks

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.naive = NaiveMarks(BLOCKS, BLOCK_TOKENS, 0)
        self.pool._state.most_entries = self.naive.most_entries = 1 << 30  # that one is refused is the other tests'
        self.chance = random.Random(seed)
        self.waiting: list[Waiting] = []
        self.start_session()

    def walk(self, steps: int) -> None:
        """Does something, so many times, and checks everything after each."""
        acts = {
            self.ask_for_some: 8,
            self.ask_for_blocks: 5,
            self.publish_some: 4,
            self.abandon_one: 2,
            self.give_blocks_back: 4,
            self.commit_some: 6,
            self.end_one: 4,
            self.hand_one_over: 1,
            self.lose_one: 0.3,
            self.let_time_pass: 2,
            self.say_so: 3,
            self.go_on_for_long: 1,
            self.look_again: 4,
            self.leave: 1,
            self.evict_everything_unheld: 2,
        }
        for _ in range(steps):
            self.chance.choices(list(acts), list(acts.values()))[0]()
            self.naive.end_unheld(self.sessions)
            self.agrees_with_the_model()
            self.marks_agree()
            self.keeps_its_invariants()
            self.nobody_waits_without_need()

    def lively(self) -> Live | None:
        lives = [one for one in self.lives if one.is_live]
        return self.chance.choice(lives) if lives else None

    def ask_for_some(self) -> None:
        tokens = self.chance.choice(PROMPTS)
        limit = self.chance.choice([len(tokens) - 1, len(tokens) - 1, len(tokens), 4, 0])
        self.ask(self.chance.choice(self.sessions), list(tokens), min(limit, len(tokens)), self.chance.random() < 0.5)

    def ask_for_blocks(self) -> None:
        """[W8] By a session that keeps tables of its own."""
        session, tokens = self.chance.choice(self.sessions), self.chance.choice([*PROMPTS, *self.marked()])
        self.acquire_some(session, tokens, self.chance.randint(0, 3), computes=self.chance.random() < 0.5)

    def go_on_for_long(self) -> None:
        """[W7] A session is at work, or acquires what it computes again and again."""
        session, asks = self.chance.choice(self.sessions), self.chance.random() < 0.5
        for _ in range(self.chance.choice([2, 33, 36])):
            self.naive.now += PATIENCE_S - 0.25
            self.pool.tell_time(self.naive.now)
            self.marks_agree()
            if not asks:
                self.say_at_work(session)
            elif marks := self.naive.marks_of(session):
                tokens = self.chance.choice(marks).tokens
                self.acquire_some(session, tokens, 0, computes=True)
                self.acquire_some(self.chance.choice(self.sessions), tokens, 0, computes=False)

    def acquire_some(self, session: int, tokens: list[int], table: int, *, computes: bool) -> None:
        tokens, stands_back = tokens[: len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS], self.chance.random() < 0.7
        matched = self.naive.present("", tokens)
        others = self.others(session, tokens, matched, len(tokens))
        before = self.pool.stats().counters
        chain = Chain(token_ids=encode(tokens))
        steps = self.pool.acquire(session, chain, table, computes=computes, uses=True, unless_pending=stands_back)
        if stands_back and self.is_worth_waiting(session, tokens, matched, len(tokens)):
            self.rematch_recency("", tokens, len(tokens))
            found = finish(steps)
            assert (len(found.held), len(found.leased), found.stands_back) == (0, 0, True)
            assert self.pool.stats().counters == before, "[W8] what is given nothing counts as a request"
            self.check_pending(found, others, tokens, matched, len(tokens))
            return
        given = self.run_acquire(session, "", tokens, table, steps)
        if given is not None:
            assert self.pool.stats().counters.allocate_count == before.allocate_count + 1
            self.check_pending(given, others, tokens, matched, len(tokens))
            if computes and not any(self.is_alive(one) for one in others):
                self.naive.mark(session, tokens, matched)

    def publish_some(self) -> None:
        """Mostly what a mark is of, behind what it has come to; else by anybody, from its beginning too."""
        session, place, tokens = self.chance.choice(self.sessions), 0, self.chance.choice([*PROMPTS, *self.marked()])
        if self.naive.marks and self.chance.random() < 0.6:
            mark = self.chance.choice(self.naive.marks)
            session, tokens = mark.session, mark.tokens[mark.committed * BLOCK_TOKENS :]
            paths = [one.path for one in self.kept.get(session, {}).values() if one.path is not None]
            if mark.committed:
                if self.naive.place(mark) not in paths:
                    return
                place = 2 + paths.index(self.naive.place(mark))
        contents = [(tokens[at], tokens[at + 1]) for at in range(0, len(tokens) - 1, BLOCK_TOKENS)]
        self.commit_blocks(self.sessions.index(session), place, contents[: self.chance.randint(1, 4)], "")

    def marked(self) -> list[list[int]]:
        return [mark.tokens for mark in self.naive.marks]

    def abandon_one(self) -> None:
        """[B8] Of its own or another's marks, or anything."""
        session, tokens = self.chance.choice(self.sessions), list(self.chance.choice(PROMPTS))
        if self.naive.marks and self.chance.random() < 0.8:
            one = self.chance.choice(self.naive.marks)
            session, tokens = self.chance.choice([session, one.session, one.session]), [*one.tokens]
        del tokens[len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS :]
        finish(self.pool.abandon(session, Chain(token_ids=encode(tokens))))
        self.naive.abandon(session, tokens)

    def give_blocks_back(self) -> None:
        self.release_blocks(self.chance.randrange(3), self.chance.sample(range(12), 6))

    def commit_some(self) -> None:
        one = self.lively()
        if one is not None:
            new = self.chance.choice([[], [], [], [1, 1]])
            target = min(one.naive.computed + self.chance.randint(0, 3), len(one.naive.tokens))
            self.compute_and_commit(one, new=new, keep=len(one.naive.tokens) + len(new) - target)

    def end_one(self) -> None:
        one = self.lively()
        if one is not None:
            self.release(one, again=False)

    def hand_one_over(self) -> None:
        one = self.lively()
        if one is not None:
            self.hand_over(one, which=self.chance.randrange(3))

    def lose_one(self) -> None:
        self.lose_session(which=self.chance.randrange(3))
        if self.chance.random() < 0.5:
            self.prove_quiet()

    def let_time_pass(self) -> None:
        self.naive.now += self.chance.choice([0.5, 0.5, 1.0, PATIENCE_S, LONGEST_STEP_S - PATIENCE_S, LONGEST_STEP_S])
        self.pool.tell_time(self.naive.now)

    def say_so(self) -> None:
        self.say_at_work(self.chance.choice(self.sessions))

    def say_at_work(self, session: int) -> None:
        self.pool.note_computing(session)
        self.naive.signs[session] = self.naive.now

    def is_alive(self, writer: NaiveSequence) -> bool:
        """[W5] [W7] It has committed something just now, or not long ago and its session says that it is at work."""
        idle_s = self.naive.now - writer.progress_at
        says_so = writer.session in self.naive.signs and self.naive.now - self.naive.signs[writer.session] < PATIENCE_S
        return idle_s < PATIENCE_S or (says_so and idle_s < LONGEST_STEP_S)

    def idle_s(self, writer: NaiveSequence) -> float:
        """[W2] How long there was no sign of it, that a sign long after its last commit is not taken for."""
        last_sign = min(
            self.naive.signs.get(writer.session, writer.progress_at), writer.progress_at + LONGEST_STEP_S - PATIENCE_S
        )
        return self.naive.now - max(writer.progress_at, last_sign)

    def ask(self, session: int, tokens: list[int], limit: int, waits: bool) -> None:
        matched = min(self.naive.present("", tokens), limit // BLOCK_TOKENS)
        others = self.others(session, tokens, matched, limit)
        worth_waiting = self.is_worth_waiting(session, tokens, matched, limit)
        steps = (self.pool.allocate_unless_pending if waits else self.pool.allocate)(
            session, Prompt(encode(tokens)), max_cached_tokens=limit
        )
        if waits and worth_waiting:
            self.rematch_recency("", tokens, limit)
            awaited = finish(steps)
            assert isinstance(awaited, Awaited)
            assert awaited.depth == matched
            self.waiting.append(Waiting(session, tokens, limit, awaited))
            return
        try:
            naive = self.naive.allocate(session, "", tokens, 0, limit)
        except DoesNotFit:
            self.rematch_recency("", tokens, limit)
            with pytest.raises(PoolExhausted):
                finish(steps)
            return
        view = finish(steps)
        assert isinstance(view, SequenceView)
        self.check_pending(view, others, tokens, matched, limit)
        self.take_in(view, naive)

    def others(self, session: int, tokens: list[int], block: int, limit: int) -> list[NaiveSequence]:
        if block >= limit // BLOCK_TOKENS:
            return []
        return [one for one in self.naive.computing("", tokens, block) if one.session != session]

    def is_worth_waiting(self, session: int, tokens: list[int], block: int, limit: int) -> bool:
        computes_itself = any(one.session == session for one in self.naive.computing("", tokens, block))
        others = self.others(session, tokens, block, limit)
        return not computes_itself and any(self.is_alive(one) for one in others)

    def check_pending(
        self, view: SequenceView | Acquired, others: list[NaiveSequence], tokens: list[int], matched: int, limit: int
    ) -> None:
        """[W2] What is told is true of a writer of the session that is named, and of a live one if there is any."""
        if view.pending is None:
            assert not others, "[W2] what another session computes was not told"
            return
        told = view.pending
        writers = [one for one in others if one.session == told.session]
        assert writers, "[W2] it is told of a session that computes nothing of it"
        last = max(one.progress_at for one in writers)
        assert told.idle_s == min(self.idle_s(one) for one in writers)
        assert told.idle_s < PATIENCE_S or not any(self.is_alive(one) for one in others)
        assert told.token_count in {
            self.shared(one, tokens, matched, limit) for one in writers if one.progress_at == last
        }

    def shared(self, writer: NaiveSequence, tokens: list[int], first: int, limit: int) -> int:
        end, size = first, BLOCK_TOKENS
        most = min(limit, len(writer.tokens)) // size
        while end < most and writer.tokens[: (end + 1) * size] == tokens[: (end + 1) * size]:
            end += 1
        return (end - first) * size

    def look_again(self) -> None:
        if not self.waiting:
            return
        one = self.chance.choice(self.waiting)
        awaited, before = one.awaited, one.awaited.depth
        is_gone = self.is_gone(awaited)
        outlook = self.pool.look_again(awaited)
        present = min(self.naive.present("", one.tokens), one.limit // BLOCK_TOKENS)
        if is_gone:
            expected = Outlook.ABANDONED
        elif self.is_worth_waiting(one.session, one.tokens, present, one.limit):
            expected = Outlook.PENDING
        else:
            expected = Outlook.ARRIVED if present > before else Outlook.ABANDONED
        assert outlook is expected
        if outlook is not Outlook.PENDING:
            self.waiting.remove(one)

    def is_gone(self, awaited: Awaited) -> bool:
        """Whether what it had come to is evicted, or its namespace forgotten and perhaps made anew."""
        state = self.pool._state
        if awaited.node >= FIRST_ROOT:
            return all(namespace.root != awaited.node for namespace in state.namespaces)
        return state.blocks.generation[awaited.node] != awaited.generation

    def leave(self) -> None:
        if self.waiting:
            self.pool.stop_waiting(self.waiting.pop(self.chance.randrange(len(self.waiting))).awaited)

    def marks_agree(self) -> None:
        """[B6] [B8] Each is there, but for some that have stalled and are not acquired; those are none from then on."""
        there = Counter((one.session, one.committed_blocks, bytes(one.tail)) for one in self.pool._state.marks.by_age)
        for mark in sorted(self.naive.marks, key=self.is_alive, reverse=True):
            tail = encode(mark.tokens[mark.committed * BLOCK_TOKENS :])
            if there[mark.session, mark.committed, tail]:
                there[mark.session, mark.committed, tail] -= 1
            else:
                assert not self.is_alive(mark), f"[B6] {mark} is not marked"
                assert self.naive.now - self.naive.asked_at[mark] >= PATIENCE_S, f"[B6] {mark} could begin anew"
                self.naive.marks.remove(mark)
        assert not +there, "[B6] [B8] what is marked is not computed"

    def nobody_waits_without_need(self) -> None:
        """[W3] Until it is told to look again, what a waiter lacks is not there, and somebody computes it."""
        told = set(self.pool.drain_moved())
        for one in self.waiting:
            assert one.awaited.moved or one.awaited not in told
            if not one.awaited.moved:
                depth = one.awaited.depth
                assert self.naive.present("", one.tokens) == depth, "[W3] it is there and nobody was told"
                assert self.naive.computing("", one.tokens, depth), "[W3] nobody computes what is awaited"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(max(WALKS, 1)))
def test_a_walk_of_chance_agrees_with_the_model(seed: int) -> None:
    """[W1] to [W8] hold, and who waits is who has to."""
    Flights(seed).walk(400)
