"""What a check is: never in the way of another, never silent about an error."""

import io
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from kvharbor.gpumem.arena import ArenaKind
from kvharbor.server.doctor import examination
from kvharbor.server.doctor.check import ANY_ARENA, ON_DEVICES, UNFORESEEN, Check, Outcome, State, obstacles, ok, warn
from kvharbor.server.doctor.examination import TOPICS, examined
from kvharbor.server.doctor.report import conclusion, table_of
from made_up_machine import MadeUpMachine


def raising() -> None:
    raise RuntimeError("never\nseen before")


BROKEN = Check("driver.broken", raising, ON_DEVICES)  # type: ignore[arg-type]
FINE = Check("kernel.fine", lambda: ok("all is well"), ANY_ARENA)
SO_SO = Check("place.so_so", lambda: warn("[half] well", "do better"), ANY_ARENA)


def topic(name: str, *checks: Check, then_raise: bool = False) -> ModuleType:
    """A topic of those checks."""

    def tell(_around: object) -> Iterator[Check]:
        yield from checks
        if then_raise:
            raising()

    module = ModuleType(f"kvharbor.server.doctor.{name}")
    module.checks = tell  # type: ignore[attr-defined]
    return module


def test_an_error_is_a_failure_with_its_text() -> None:
    """In one line, as the table and the log have lines."""
    finding = BROKEN.finding()
    assert (finding.state, finding.found, finding.remedy) == (
        State.FAIL,
        "RuntimeError: never seen before",
        UNFORESEEN,
    )


def test_a_failing_check_or_topic_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that can be known is told, in order."""
    topics = (topic("driver", BROKEN, SO_SO, then_raise=True), topic("kernel", FINE))
    monkeypatch.setattr(examination, "TOPICS", topics)
    findings = list(examined(MadeUpMachine.plain_host(tmp_path).surroundings()))
    assert [finding.check for finding in findings] == ["driver.broken", "place.so_so", "driver", "kernel.fine"]
    assert findings[2].state is State.FAIL


def test_a_check_that_never_ends_stops_its_topic_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver may hang in any call: what else can be known is told all the same."""
    end = threading.Event()

    def hanging() -> Outcome:
        end.wait()
        return ok("too late")

    topics = (topic("driver", SO_SO, Check("driver.hangs", hanging, ON_DEVICES), SO_SO), topic("kernel", FINE))
    monkeypatch.setattr(examination, "TOPICS", topics)
    monkeypatch.setattr(examination, "DEADLINE_S", 0.5)
    findings = list(examined(MadeUpMachine.plain_host(tmp_path).surroundings()))
    end.set()
    assert [finding.check for finding in findings] == ["place.so_so", "driver.hangs", "kernel.fine"]
    assert (findings[1].state, findings[1].found) == (State.FAIL, "no answer within 0.5 s")
    assert [each.check for each in obstacles(findings, ArenaKind.CUDA_VMM)] == ["driver.hangs"]


def test_only_failures_that_an_arena_needs_are_in_its_way() -> None:
    """A host without a GPU is well enough for the host's arena."""
    findings = [check.finding() for check in (BROKEN, FINE, SO_SO)]
    assert obstacles(findings, ArenaKind.HOST) == []
    assert [finding.check for finding in obstacles(findings, ArenaKind.CUDA_VMM)] == ["driver.broken"]


def test_programs_get_four_values() -> None:
    """The keys are the command's promise."""
    assert SO_SO.finding().as_json() == {
        "check": "place.so_so",
        "state": "WARN",
        "found": "[half] well",
        "remedy": "do better",
    }


def test_people_get_every_finding_and_a_line_for_each_arena() -> None:
    """What an error says is not taken for markup."""
    findings = [check.finding() for check in (BROKEN, FINE, SO_SO)]
    console = Console(file=io.StringIO(), width=160)
    console.print(table_of(findings))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for expected in ("driver.broken", "FAIL", "RuntimeError: never seen before", "[half] well", "do better"):
        assert expected in shown
    assert conclusion(findings, ArenaKind.CUDA_IPC) == [
        "the chosen arena cuda_ipc: does not work here, see driver.broken",
        "arena host: works here",
        "arena cuda_vmm: does not work here, see driver.broken",
    ]


def test_names_of_checks_are_distinct_and_begin_with_a_topic(tmp_path: Path) -> None:
    """Programs find a check by its name."""
    around = MadeUpMachine.plain_host(tmp_path).surroundings()
    names = [check.name for each in TOPICS for check in each.checks(around)]
    assert len(set(names)) == len(names) > 25
    assert [name for name in names if name.count(".") not in (1, 2) or not name.islower()] == []
