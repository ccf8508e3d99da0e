"""Each rule of single flight broken in turn: the naive model has to notice, without the pool's own check of them."""

from collections.abc import Callable
from typing import Any

import pytest
from test_pool_against_naive_model import BLOCK_TOKENS
from test_single_flight_against_naive_model import Flights

from kvharbor.pool import Pool, acquisition, holdings_check, invariants, lifecycle, writers
from kvharbor.pool.awaiting import Awaiting, Outlook
from kvharbor.pool.errors import PoolExhausted
from kvharbor.pool.marks import Marks
from kvharbor.pool.namespaces import FIRST_ROOT
from kvharbor.pool.results import Pending
from kvharbor.pool.sequence import Sequence
from kvharbor.pool.state import State
from kvharbor.pool.writers import Writer, Writers


def stays_where_it_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    """[W1] A writer that commits stays at its first block."""
    place = Writers.place

    def placed_once(self: Writers, sequence: Sequence, now: float) -> None:
        if sequence.writer_key is None or self.key_of(sequence) is None:
            place(self, sequence, now)

    monkeypatch.setattr(Writers, "place", placed_once)


def lost_and_still_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """[W1] A lost session's sequences stay in the table until its processes are proved gone."""
    remove, end_session = Writers.remove, lifecycle.end_session

    def kept(*arguments: Any) -> Any:
        monkeypatch.setattr(Writers, "remove", lambda *_: None)
        yield from end_session(*arguments)
        monkeypatch.setattr(Writers, "remove", remove)

    monkeypatch.setattr(lifecycle, "end_session", kept)


def tells_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """[W2] All that the writer computes is told, whatever the caller's prompt."""
    monkeypatch.setattr(Writers, "_shared_count", lambda self, writer, _: len(writer.tail) // self._block_bytes)


def tells_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """[W2] What the caller's own session computes is told, too."""
    other = Writers._other
    monkeypatch.setattr(Writers, "_other", lambda self, key, _, now: other(self, key, -1, now))


def nobody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """[W3] A block is published, and those who wait for it sleep on."""
    monkeypatch.setattr(Awaiting, "move", lambda *_: None)


def waits_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """[W4] A session that computes a block waits for another that does."""

    def other_or_not(self: Writers, key: bytes, session: int, now: float) -> Writer | None:
        writer = self._other(key, session, now)
        return None if writer is None or self.has_stalled(writer, now) else writer

    monkeypatch.setattr(Writers, "_worth_waiting_for", other_or_not)


def never_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    """[W5] A dead writer is waited for until it is known to be dead."""
    monkeypatch.setattr(Writers, "has_stalled", lambda *_: False)


def progress_is_not_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """[W5] Half a block is no progress."""
    monkeypatch.setattr(Writers, "note_progress", lambda *_: None)


def signs_are_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """[W7] Who says that it is at work has stalled all the same."""
    monkeypatch.setattr(Pool, "note_computing", lambda *_: None)


def signs_are_everybodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """[W7] What one session says is taken for what all others do."""

    class Shared(dict[int, float]):
        def get(self, _: int, default: Any = None) -> Any:
            return max(self.values(), default=default)

    alive_at = Writers._alive_at

    def shared(self: Writers, writer: Writer) -> float:
        self.signs = Shared(self.signs)
        return alive_at(self, writer)

    monkeypatch.setattr(Writers, "_alive_at", shared)


def signs_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """[W7] An engine that hangs in a step is waited for as long as it lives."""
    monkeypatch.setattr(writers, "LONGEST_STEP_S", 1e9)


def waiters_know_of_no_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    """[W7] Whoever waits already takes over at the time at which it would have had to without a sign."""

    def impatient(self: Writers, key: bytes, session: int, now: float) -> Writer | None:
        writer = None if session in self.by_key.get(key, ()) else self._other(key, session, now)
        return None if writer is None or now - writer.progress_at >= writers.PATIENCE_S else writer

    monkeypatch.setattr(Writers, "_worth_waiting_for", impatient)


def arrived_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """[W5] A takeover is taken for an arrival."""
    look_again = Writers.look_again

    def rosy(self: Writers, *arguments: Any) -> Outlook:
        outlook = look_again(self, *arguments)
        return Outlook.ARRIVED if outlook is Outlook.ABANDONED else outlook

    monkeypatch.setattr(Writers, "look_again", rosy)


def takes_what_is_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    """[W8] Nobody stands back."""
    monkeypatch.setattr(Writers, "worth_waiting_for", lambda *_: None)


def stands_back_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """[W4] [W8] A session that computes a block stands back for another that does."""

    def pending_or_not(self: Writers, writer: Writer, reusable_blocks: int, now: float) -> Pending | None:
        pending = self.pending(writer, reusable_blocks, now)
        return None if pending is None or pending.idle_s >= writers.PATIENCE_S else pending

    monkeypatch.setattr(Writers, "worth_waiting_for", pending_or_not)


def stands_back_for_the_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """[W5] [W8] Whoever has stalled is left to it."""

    def pending_from_others(self: Writers, writer: Writer, reusable_blocks: int, now: float) -> Pending | None:
        is_own = writer.session in self.by_key.get(self.key_of(writer) or b"", ())
        return None if is_own else self.pending(writer, reusable_blocks, now)

    monkeypatch.setattr(Writers, "worth_waiting_for", pending_from_others)


def standing_back_is_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """[W8] What is given nothing counts."""
    look = acquisition._pending_elsewhere

    def counted(state: State, carrier: Sequence, *of: Any) -> Pending | None:
        pending = look(state, carrier, *of)
        if pending is not None:
            state.count_request(state.session(carrier.session), state.block_tokens, [])
        return pending

    monkeypatch.setattr(acquisition, "_pending_elsewhere", counted)


def holds_what_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """[W8] What is there is held by who stands back."""
    look = acquisition._pending_elsewhere

    def held(state: State, carrier: Sequence, run: list[int], *of: Any) -> Pending | None:
        pending = look(state, carrier, run, *of)
        if pending is not None and not carrier.table:
            state.blocks.hold(state.sessions[carrier.session].blocks.add(run, carrier.chain_node))
        return pending

    monkeypatch.setattr(acquisition, "_pending_elsewhere", held)


def nothing_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """[B8] What a session says of that is not heard."""
    monkeypatch.setattr(Marks, "abandon", lambda *_: None)


def abandoned_at_the_root_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """[B8] A mark that has got on is not found."""
    abandon = Marks.abandon

    def at_the_root(self: Marks, session: int, nodes: list[int], *of: Any) -> None:
        abandon(self, session, [node for node in nodes[:1] if node >= FIRST_ROOT], *of)

    monkeypatch.setattr(Marks, "abandon", at_the_root)


def abandoned_in_the_first_slice_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """[B8] A mark that has got far is not found."""
    abandon = Marks.abandon

    def at_first(self: Marks, session: int, nodes: list[int], first: int, *of: Any) -> None:
        if not first:
            abandon(self, session, nodes, first, *of)

    monkeypatch.setattr(Marks, "abandon", at_first)


def abandons_what_begins_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """[B8] Chains that go on elsewhere, or further, end too."""
    own = Marks._own

    def all_of_it(self: Marks, session: int, nodes: list[int], first: int, contents: bytes, _: Any) -> None:
        size = 4 * BLOCK_TOKENS
        for block, node in enumerate(nodes, first):
            for mark in own(self, session, node, contents[block * size : (block + 1) * size]):
                self._end(mark)

    monkeypatch.setattr(Marks, "abandon", all_of_it)


def abandons_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """[B8] Whoever computes the same is taken to have stopped too."""
    abandon = Marks.abandon

    def for_all(self: Marks, _: int, *of: Any) -> None:
        for session in [*self.by_session]:
            abandon(self, session, *of)

    monkeypatch.setattr(Marks, "abandon", for_all)


def marks_stay_where_they_were_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """[B6] What is committed is pending on."""
    monkeypatch.setattr(Marks, "advance", lambda *_: None)


def marks_outlive_what_they_are_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """[B6] Whose hold ends is still said to compute what comes then."""
    monkeypatch.setattr(Marks, "end_behind", lambda *_: None)


def marks_outlive_their_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """[B6]"""
    monkeypatch.setattr(Marks, "end_session", lambda *_: None)


MUTANTS = [
    stays_where_it_entered,
    lost_and_still_there,
    tells_too_much,
    tells_of_its_own,
    nobody_is_told,
    waits_for_itself,
    never_stalls,
    progress_is_not_noted,
    signs_are_not_heard,
    signs_are_everybodys,
    signs_without_end,
    waiters_know_of_no_sign,
    arrived_without_it,
    takes_what_is_pending,
    stands_back_for_itself,
    stands_back_for_the_dead,
    standing_back_is_a_request,
    holds_what_it_leaves,
    nothing_is_abandoned,
    abandoned_at_the_root_alone,
    abandoned_in_the_first_slice_alone,
    abandons_what_begins_alike,
    abandons_for_others,
    marks_stay_where_they_were_made,
    marks_outlive_what_they_are_behind,
    marks_outlive_their_session,
]


@pytest.mark.slow
@pytest.mark.parametrize("break_rule", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_broken_rule_is_noticed(break_rule: Callable[[pytest.MonkeyPatch], None], monkeypatch: Any) -> None:
    """Walks that the pool takes without a complaint fail once a rule is broken."""
    monkeypatch.setattr(invariants, "check_writers", lambda *_: None)
    monkeypatch.setattr(holdings_check, "_check_marks", lambda *_: None)
    break_rule(monkeypatch)
    with pytest.raises((AssertionError, KeyError, PoolExhausted, pytest.fail.Exception)):
        walk_all()


def walk_all() -> None:
    for seed in range(100):
        Flights(seed).walk(200)
