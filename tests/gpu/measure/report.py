"""What was found, as a file for machines and a table for people."""

import datetime
import importlib.metadata
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpu.measure.question import Answer, Figures, Question
from gpu.rig import Rig
from kvharbor.gpumem import driver

PACKAGES = ("kvharbor", "torch", "triton", "cupy-cuda13x", "cupy-cuda12x", "cuda-bindings", "transformers", "grpcio")


@dataclass(frozen=True, slots=True)
class Entry:
    """A question with its answer, or with the reason why there is none."""

    name: str
    question: str
    answered: bool
    answer: str
    figures: Figures
    took_s: float

    @classmethod
    def found(cls, question: Question, answer: Answer, took_s: float) -> "Entry":
        """What came of asking."""
        return cls(question.name, question.text, True, answer.answer, answer.figures, round(took_s, 1))

    @classmethod
    def failed(cls, question: Question, why: str, took_s: float) -> "Entry":
        """Asking went wrong."""
        return cls(question.name, question.text, False, f"not answered: {why}", {}, round(took_s, 1))


def write(path: Path, surroundings: Figures, entries: Sequence[Entry]) -> None:
    """Writes everything as JSON; a reader never finds half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps({**surroundings, "entries": [asdict(entry) for entry in entries]}, indent=2)
    made = path.with_suffix(".new")
    made.write_text(content + "\n")
    made.replace(path)


def show(surroundings: Figures, entries: Sequence[Entry]) -> None:
    """Prints a table: a row a question, a line a clause of the answer."""
    title = surroundings["device"] if surroundings["on_hardware"] else "A STUB: NOTHING HERE IS TRUE OF ANY DEVICE"
    table = Table(title=title, title_justify="left", show_lines=True)
    table.add_column("name", no_wrap=True)
    table.add_column("answer", overflow="fold")
    table.add_column("s", justify="right", no_wrap=True)
    for entry in entries:
        answer = Text(entry.answer.replace("; ", "\n"), style="" if entry.answered else "red")
        table.add_row(entry.name, answer, f"{entry.took_s:.1f}")
    Console().print(table)


def surroundings_of(rig: Rig) -> Figures:
    """On what it was measured."""
    version = ".".join(map(str, driver.driver_version()))
    return {
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "on_hardware": rig.on_hardware,
        "device": rig.device.name,
        "device_total_bytes": driver.device_total_bytes(rig.device.ordinal),
        "driver_speaks_cuda": version,
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name)) is not None},
    }


def _version(package: str) -> Any:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
