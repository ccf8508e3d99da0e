"""Who computes in a pool, and what each engine reuses of whom. Rules [U1] to [U4]: no block changes its state by it.

Each block has a byte that says whose commit has published it, and how many in a row up to it are of the same. So what
a request reuses is counted by going back over its engines, not over its blocks.
"""

from array import array
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from kvharbor.pool.blocks import COMMITTED
from kvharbor.pool.namespaces import FIRST_ROOT

MOST: Final = 64
"""Engines that are told apart, in a byte at most, with the groups."""
EARLIER: Final = 0
OTHERS: Final = 1

_NOBODY: Final = 0xFF
_NOBODY_BUT_OF_COMMITTED: Final = bytes(0 if kind == COMMITTED else _NOBODY for kind in range(256))


class EngineGroup(StrEnum):
    """Engines that are told together."""

    NONE = "none"
    """One engine, or all of one name and version, or of one name."""
    OTHERS = "others"
    """Those that there is no room to tell apart."""
    EARLIER = "earlier"
    """Those that have published with an earlier process."""


@dataclass(frozen=True, slots=True, order=True)
class Engine:
    """What an engine is called; `instance` tells those of one name and version apart."""

    name: str = ""
    version: str = ""
    instance: str = ""

    @property
    def kind(self) -> "Engine":
        """All of its name and version."""
        return Engine(self.name, self.version)

    @property
    def software(self) -> "Engine":
        """All of its name."""
        return Engine(self.name)


UNNAMED: Final = Engine()


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One engine at one moment. `reuses` has tokens by the place of who has published them, in the same tuple."""

    engine: Engine
    group: EngineGroup
    session_count: int
    prompt_token_count: int
    reused_token_count: int
    reuses: tuple[tuple[int, int], ...]
    held_block_count: int
    committed_block_count: int


@dataclass(slots=True, eq=False)
class Row:
    """What is counted of an engine. `reused` has blocks by the number of who has published them."""

    prompt_token_count: int = 0
    reused: dict[int, int] = field(default_factory=dict)

    def add(self, other: "Row") -> None:
        """Takes in what was counted of another one."""
        self.prompt_token_count += other.prompt_token_count
        for number, block_count in other.reused.items():
            self.reused[number] = self.reused.get(number, 0) + block_count


class Engines:
    """Engines by number: EARLIER, OTHERS, and those that have a name. A number is an engine's while it has a session.

    `numbers` are in the order in which their last sessions began, or they were told together first.
    """

    def __init__(self, id_count: int) -> None:
        # What is not in the index has any.
        self.author = bytearray([EARLIER]) * id_count
        # 0 of a block of EARLIER: all before it are of EARLIER too.
        self.run_length = array("I", bytes(4 * id_count))
        self.numbers: dict[Engine, int] = {}
        self.rows: dict[int, Row] = {EARLIER: Row(), OTHERS: Row()}

    def begin(self, engine: Engine, live: Container[int]) -> int:
        """Returns the number of an engine of which a session begins; `live` are the numbers of those that have one.

        If there are MOST of them already, others are told together, in less than a nanosecond a block.
        """
        number = self.numbers.pop(engine, None)
        if number is None:
            room = self._room(engine, live)
            # It may be what others have just been told as.
            number = self.numbers.pop(engine, room)
        if number is None:
            return self.numbers.get(engine.kind, self.numbers.get(engine.software, OTHERS))
        self.numbers[engine] = number
        self.rows.setdefault(number, Row())
        return number

    def published(self, number: int, blocks: Sequence[int], parent: int) -> None:
        """Blocks have entered the index, each behind the one before, by a commit of this engine."""
        author, run_length = self.author, self.run_length
        length = run_length[parent] if parent < FIRST_ROOT and author[parent] == number else 0
        for block in blocks:
            length += 1
            author[block] = number
            run_length[block] = length

    def granted(self, number: int, prompt_token_count: int, reused: Sequence[int]) -> None:
        """A request of this engine is granted, with these blocks of the index, from the first of its prompt on."""
        row = self.rows[number]
        row.prompt_token_count += prompt_token_count
        left = len(reused)
        while left:
            last = reused[left - 1]
            author, block_count = self.author[last], self.run_length[last] or left
            row.reused[author] = row.reused.get(author, 0) + block_count
            left -= block_count

    def committed(self, state: bytearray) -> dict[int, int]:
        """Returns how many blocks of the index each has published, by number, from the states of all blocks.

        It takes some nanoseconds a block, and a part of one for each engine.
        """
        # The bytes one by one, but in C: the author of each committed block, _NOBODY for the others.
        authors = int.from_bytes(self.author, "little")
        others = int.from_bytes(state.translate(_NOBODY_BUT_OF_COMMITTED), "little")
        published = (authors | others).to_bytes(len(state), "little")
        return {number: published.count(number) for number in self.rows}

    def stats(
        self, block_tokens: int, held: Mapping[int, tuple[int, int]], committed: Mapping[int, int]
    ) -> tuple[EngineStats, ...]:
        """Returns all that there is to tell, groups last.

        `held` has sessions and blocks held by number, `committed` what the method of that name returns.
        """
        named = [(engine, EngineGroup.NONE, number) for engine, number in sorted(self.numbers.items())]
        groups = [(UNNAMED, EngineGroup.OTHERS, OTHERS), (UNNAMED, EngineGroup.EARLIER, EARLIER)]
        authors = {author for row in self.rows.values() for author in row.reused}
        shown = authors | held.keys() | {number for number, row in self.rows.items() if row.prompt_token_count}
        shown |= {number for number, block_count in committed.items() if block_count}
        told = [each for each in (*named, *groups) if each[2] in shown]
        places = {number: place for place, (_, _, number) in enumerate(told)}
        return tuple(
            EngineStats(
                engine=engine,
                group=group,
                session_count=held.get(number, (0, 0))[0],
                prompt_token_count=self.rows[number].prompt_token_count,
                reused_token_count=block_tokens * sum(self.rows[number].reused.values()),
                reuses=tuple(
                    sorted((places[author], block_tokens * count) for author, count in self.rows[number].reused.items())
                ),
                held_block_count=held.get(number, (0, 0))[1],
                committed_block_count=committed[number],
            )
            for engine, group, number in told
        )

    def _room(self, newcomer: Engine, live: Container[int]) -> int | None:
        """Returns a number for one more engine, if need be by telling some without sessions together [U3].

        None if it is to be told with others itself.
        """
        if len(self.numbers) < MOST:
            return next(number for number in range(OTHERS + 1, OTHERS + 1 + MOST) if number not in self.rows)
        idle = [engine for engine, number in self.numbers.items() if number not in live] + [newcomer]
        for groups in ([engine.kind for engine in idle], [engine.software for engine in idle]):
            firsts: dict[Engine, Engine] = {}
            for engine, group in zip(idle, groups, strict=True):
                first = firsts.setdefault(group, engine)
                if first != engine and group not in self.numbers:
                    self.numbers[group] = self.numbers.pop(first)
                if group in self.numbers and engine == newcomer:
                    return None
                if group in self.numbers and engine != group:
                    return self._told_as(self.numbers.pop(engine), self.numbers[group])
        return None

    def _told_as(self, number: int, other: int) -> int:
        """Counts one as another from now on; returns the number, which is free."""
        self.rows[other].add(self.rows.pop(number))
        for row in self.rows.values():
            if number in row.reused:
                row.reused[other] = row.reused.get(other, 0) + row.reused.pop(number)
        self.author = self.author.replace(bytes((number,)), bytes((other,)))
        return number
