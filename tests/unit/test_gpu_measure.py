"""What measures on a device, as far as that goes without one: its processes, its watching, its report."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from contract.arena_kinds import KINDS
from gpu.actor import Actor
from gpu.death import DeathTimes
from gpu.decode import attend_contiguous, attend_gathered
from gpu.measure import __main__ as command
from gpu.measure.asking import ask_apart
from gpu.measure.question import Answer, Question
from gpu.measure.questions import QUESTIONS
from gpu.measure.report import Entry, write
from gpu.measure.worker_killed import ARENA_BYTES, conclusion, death_of, summary
from gpu.rig import closed_after
from gpu.writers import Load


@pytest.fixture
def actors() -> Iterator[list[Actor]]:
    """Two other processes, without any device."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Actor.spawned()) for _ in range(2)]


@pytest.mark.slow
def test_a_killed_process_is_watched_to_its_last_store(actors: list[Actor]) -> None:
    """On a host a readable pidfd means that no store comes any more [S24]: here the watch itself is on trial."""
    owner, worker = actors
    with closed_after(owner.create("host", ARENA_BYTES)) as export:
        death = death_of(worker, KINDS["host"], "host", export, Load.ONE_THREAD)
    assert worker.process.returncode == -9
    assert death.pidfd_ms > 0
    assert death.socket_end_ms > 0
    assert death.late_stores_ms <= 0
    # It was storing until it was killed: a watch that had missed that would say much less.
    assert death.last_store_ms > -1000


@pytest.mark.parametrize(
    ("last_store_ms", "said"),
    [
        (3.0, "no store came after the pidfd was readable; the nearest was 1.50 ms before"),
        (4.8, "no store was seen after the pidfd was, but one may have come up to 0.30 ms after it"),
        (7.0, "a store came up to 2.50 ms AFTER the pidfd was readable: device_grace_s must cover that"),
    ],
)
def test_the_worst_death_decides(last_store_ms: float, said: str) -> None:
    """One store that comes late is what the grace is for, however many come in time."""
    deaths = [DeathTimes(1.0, 5.0, 0.5, 0.1), DeathTimes(1.0, 5.0, last_store_ms, 0.5)]
    assert conclusion(deaths) == f"in 2 kills {said}"
    assert summary(deaths)["late_stores_ms"]["worst"] == pytest.approx(last_store_ms - 5.0)


def test_every_question_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """By the name under which its answer is found."""
    assert command.main(["--list"]) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == list(QUESTIONS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["second_open", "error_codes"])
def test_a_question_is_answered_by_a_process_of_its_own(name: str) -> None:
    """On the stub: whatever it does to its context is that process's."""
    entry = ask_apart(QUESTIONS[name], ["--dry-run"])
    assert entry.answered, entry.answer
    assert (entry.name, list(entry.figures)) == (name, ["driver"])


@pytest.mark.slow
@pytest.mark.parametrize(("deadline_s", "why"), [(60.0, "status 2"), (0.01, "no answer within 0.01 s")])
def test_a_question_that_fails_or_hangs_is_an_entry_too(deadline_s: float, why: str) -> None:
    """The others go on."""
    entry = ask_apart(Question("unheard-of", "?", lambda _: Answer("", {})), ["--dry-run"], deadline_s)
    assert not entry.answered
    assert why in entry.answer


def test_the_report_is_json_with_an_entry_a_question(tmp_path: Path) -> None:
    """Answered or not; there is never half a file."""
    question = Question("q", "why?", lambda _: Answer("", {}))
    entries = [
        Entry.found(question, Answer("because", {"ms": {"median": 1.5}}), 0.26),
        Entry.failed(question, "status 1: no", 1.0),
    ]
    write(tmp_path / "made" / "gpu.json", {"on_hardware": False}, entries)
    (file,) = (tmp_path / "made").iterdir()
    content = json.loads(file.read_text())
    assert content.pop("on_hardware") is False
    assert content == {
        "entries": [
            {
                "name": "q",
                "question": "why?",
                "answered": True,
                "answer": "because",
                "figures": {"ms": {"median": 1.5}},
                "took_s": 0.3,
            },
            {
                "name": "q",
                "question": "why?",
                "answered": False,
                "answer": "not answered: status 1: no",
                "figures": {},
                "took_s": 1.0,
            },
        ]
    }


def test_gathering_blocks_gives_what_contiguous_memory_gives() -> None:
    """The yardstick of the measurement computes the same thing, grouped queries included."""
    torch.manual_seed(0)
    keys, values = torch.randn(2, 3, 2, 32, 8)
    table = torch.tensor([[5, 1], [0, 3], [2, 4]])
    blocks = [torch.zeros(6, 16, 2, 8) for _ in range(2)]
    for kind, plain in zip(blocks, (keys, values), strict=True):
        kind[table] = plain.transpose(1, 2).reshape(3, 2, 16, 2, 8)
    query = torch.randn(3, 4, 8)
    assert torch.equal(attend_gathered(query, blocks[0], blocks[1], table), attend_contiguous(query, keys, values))
