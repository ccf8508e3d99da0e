"""Each rule of who reuses what from whom broken in turn: the diary of `tests/model/naive_engines.py` has to notice."""

from collections.abc import Callable, Container, Sequence

import pytest
from naive_engines import walk

from kvharbor.pool import Engine, engines
from kvharbor.pool.engines import OTHERS, Engines, Row
from kvharbor.pool.errors import InvariantViolation
from kvharbor.pool.namespaces import FIRST_ROOT
from kvharbor.pool.sequence import Session
from kvharbor.pool.state import State

_begin = Engines.begin
_granted = Engines.granted
_published = Engines.published
_room = Engines._room
_told_as = Engines._told_as
_count_request = State.count_request


def last_author_taken_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """[U2] Whoever has published the last block has all that is reused."""

    def granted(self: Engines, number: int, prompt_token_count: int, reused: Sequence[int]) -> None:
        _granted(self, number, prompt_token_count, [])
        if reused:
            counts, author = self.rows[number].reused, self.author[reused[-1]]
            counts[author] = counts.get(author, 0) + len(reused)

    monkeypatch.setattr(Engines, "granted", granted)


def runs_go_on_whoever_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    """[U1] What an engine commits behind another's blocks takes these with it."""

    def published(self: Engines, number: int, blocks: Sequence[int], parent: int) -> None:
        length = self.run_length[parent] if parent < FIRST_ROOT else 0
        for place, block in enumerate(blocks, 1):
            self.author[block], self.run_length[block] = number, length + place

    monkeypatch.setattr(Engines, "published", published)


def first_author_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """[U1] A block that is used again keeps the engine that had it before."""

    def published(self: Engines, number: int, blocks: Sequence[int], parent: int) -> None:
        before = [self.author[block] for block in blocks]
        _published(self, number, blocks, parent)
        for block, author in zip(blocks, before, strict=True):
            self.author[block] = author or number

    monkeypatch.setattr(Engines, "published", published)


def all_blocks_told_as_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """[U2] What has left the index counts on."""
    monkeypatch.setattr(Engines, "committed", lambda self, _: {each: self.author.count(each) for each in self.rows})


def all_taken_for_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """[U2] What an engine reuses counts as its own."""

    def granted(self: Engines, number: int, prompt_token_count: int, reused: Sequence[int]) -> None:
        _granted(self, number, prompt_token_count, [])
        if reused:
            self.rows[number].reused[number] = self.rows[number].reused.get(number, 0) + len(reused)

    monkeypatch.setattr(Engines, "granted", granted)


def questions_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """[U2] A request is counted twice in the pool, once with its engine."""

    def count_request(self: State, owner: Session, prompt_token_count: int, reused: Sequence[int]) -> None:
        _count_request(self, owner, prompt_token_count, reused)
        self.counters.prompt_token_count += 1

    monkeypatch.setattr(State, "count_request", count_request)


def blocks_of_the_told_together_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """[U3] What they have published goes to who gets the number next."""

    def told_as(self: Engines, number: int, other: int) -> int:
        author = self.author
        _told_as(self, number, other)
        self.author = author
        return number

    monkeypatch.setattr(Engines, "_told_as", told_as)


def figures_of_the_told_together_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """[U3] What was counted of them is lost."""
    monkeypatch.setattr(Row, "add", lambda *_: None)


def live_ones_told_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """[U3] An engine with a session gives way to a new one."""
    monkeypatch.setattr(Engines, "begin", lambda self, engine, _: _begin(self, engine, ()))


def ended_ones_not_known_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """[U3] An engine that starts again is another one."""

    def begin(self: Engines, engine: Engine, live: Container[int]) -> int:
        number = self.numbers.get(engine, OTHERS)
        if number != OTHERS and number not in live:
            self._told_as(self.numbers.pop(engine), OTHERS)
        return _begin(self, engine, live)

    monkeypatch.setattr(Engines, "begin", begin)


def oldest_by_first_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """[U3] One whose last session has just ended gives way before those that were not seen for long."""

    def begin(self: Engines, engine: Engine, live: Container[int]) -> int:
        return self.numbers[engine] if engine in self.numbers else _begin(self, engine, live)

    monkeypatch.setattr(Engines, "begin", begin)


def kind_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """[U3] Name and version are lost at once."""
    monkeypatch.setattr(Engine, "kind", property(lambda _: Engine()))


def versions_told_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """[U3] A version that goes takes what it has counted from its name, which stays."""

    def room(self: Engines, newcomer: Engine, live: Container[int]) -> int | None:
        if (number := _room(self, newcomer, live)) is None:
            idle = [engine for engine, number in self.numbers.items() if number not in live]
            return self._told_as(self.numbers.pop(idle[0]), OTHERS) if idle else None
        return number

    monkeypatch.setattr(Engines, "_room", room)


@pytest.mark.slow
@pytest.mark.parametrize(
    "break_rule",
    [
        last_author_taken_for_all,
        runs_go_on_whoever_commits,
        first_author_stays,
        all_blocks_told_as_there,
        all_taken_for_own,
        questions_counted,
        blocks_of_the_told_together_forgotten,
        figures_of_the_told_together_forgotten,
        live_ones_told_together,
        ended_ones_not_known_again,
        oldest_by_first_session,
        kind_not_kept,
        versions_told_among_others,
    ],
)
def test_a_broken_rule_is_noticed(
    break_rule: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever it is."""
    monkeypatch.setattr(engines, "MOST", 5)
    break_rule(monkeypatch)
    with pytest.raises((AssertionError, InvariantViolation, KeyError)):
        _walk_all()


def _walk_all() -> None:
    for seed in range(12):
        walk(seed, 200)
