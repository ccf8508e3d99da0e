"""A check, what it says, and whether that stands in the way of an arena.

A check is named "topic.subject". What it raises is a finding too: FAIL, with the error's own text, never less.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvharbor.gpumem import GpumemError
from kvharbor.gpumem.arena import ArenaKind
from kvharbor.gpumem.remedies import cause_and_remedy

ANY_ARENA: Final = frozenset(ArenaKind)
ON_DEVICES: Final = frozenset({ArenaKind.CUDA_IPC, ArenaKind.CUDA_VMM})
NO_ARENA: Final[frozenset[ArenaKind]] = frozenset()

UNFORESEEN: Final = "not foreseen here: the error is as it came; report it with the output of `kvharbor doctor --json`"


class State(StrEnum):
    """OK: nothing to do. WARN: works, but see the remedy. FAIL: does not work. SKIPPED: could not be looked at."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a look has found, and what to change; an OK has a remedy only where there is something to gain.

    `open`: a FAIL that says nothing of any arena, as what was to be looked at is not there. `lacking`: what was not
    looked at is in the way all the same, of an arena that nobody has chosen.
    """

    state: State
    found: str
    remedy: str = ""
    open: bool = False
    lacking: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of a check. A FAIL, or what is lacking, stands in the way of the arenas in `needed_by`."""

    check: str
    state: State
    found: str
    remedy: str
    needed_by: frozenset[ArenaKind]
    open: bool = False
    lacking: bool = False

    def as_json(self) -> dict[str, str]:
        """Returns what programs get."""
        return {"check": self.check, "state": self.state.value, "found": self.found, "remedy": self.remedy}


@dataclass(frozen=True, slots=True)
class Check:
    """Something to look at, and the arenas that cannot work where it fails."""

    name: str
    look: Callable[[], Outcome]
    needed_by: frozenset[ArenaKind] = NO_ARENA

    def finding(self) -> Finding:
        """Looks; whatever is raised is a FAIL with its text."""
        try:
            outcome = self.look()
        except GpumemError as failure:
            cause, remedy = cause_and_remedy(failure)
            outcome = fail(cause, remedy or UNFORESEEN)
        except Exception as failure:
            outcome = fail(error_text(failure), UNFORESEEN)
        return Finding(
            self.name,
            outcome.state,
            outcome.found,
            outcome.remedy,
            self.needed_by,
            open=outcome.open,
            lacking=outcome.lacking,
        )


def ok(found: str, remedy: str = "") -> Outcome:
    """All is well; `remedy` says how it could be better still."""
    return Outcome(State.OK, found, remedy)


def warn(found: str, remedy: str) -> Outcome:
    """It works, with a catch."""
    return Outcome(State.WARN, found, remedy)


def fail(found: str, remedy: str) -> Outcome:
    """It does not work."""
    return Outcome(State.FAIL, found, remedy)


def cannot_be_told(found: str, remedy: str) -> Outcome:
    """Neither works nor fails: what was asked to be looked at is not there."""
    return Outcome(State.FAIL, f"cannot be told: {found}", remedy, open=True)


def skipped(found: str) -> Outcome:
    """It was not looked at, for the reason in `found`."""
    return Outcome(State.SKIPPED, found)


def lacking(found: str, remedy: str) -> Outcome:
    """It is not there, and nobody has asked for it."""
    return Outcome(State.SKIPPED, found, remedy, lacking=True)


def obstacles(findings: Iterable[Finding], arena: ArenaKind) -> list[Finding]:
    """Returns what `arena` cannot do with."""
    in_the_way = (found for found in findings if found.state is State.FAIL or found.lacking)
    return [found for found in in_the_way if arena in found.needed_by]


def error_text(failure: BaseException) -> str:
    """Returns kind and text of an error in one line."""
    return f"{type(failure).__name__}: {' '.join(str(failure).split())}"
