"""A figure, its aim, and how a list of them is shown and kept."""

import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value. `aim` is None where none was set."""

    name: str
    value: float
    unit: str
    aim: float | None
    better: Literal["lower", "higher"] = "lower"

    @property
    def reached(self) -> bool | None:
        """Whether the aim is met; None without one."""
        if self.aim is None:
            return None
        return self.value <= self.aim if self.better == "lower" else self.value >= self.aim


def interleaved(samples: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Takes one sample of each in turn, `rounds` times; returns the median of each, in the samples' own unit."""
    taken = interleaved_parts({name: _single(sample) for name, sample in samples.items()}, rounds)
    return {name: parts[""] for name, parts in taken.items()}


def interleaved_parts(
    samples: Mapping[str, Callable[[], Mapping[str, float]]], rounds: int
) -> dict[str, dict[str, float]]:
    """Does what `interleaved` does for samples that consist of named parts; returns the medians of each part."""
    taken: dict[str, dict[str, list[float]]] = {name: {} for name in samples}
    for _ in range(rounds):
        for name, sample in samples.items():
            for part, value in sample().items():
                taken[name].setdefault(part, []).append(value)
    return {name: {part: median(values) for part, values in parts.items()} for name, parts in taken.items()}


def _single(sample: Callable[[], float]) -> Callable[[], Mapping[str, float]]:
    return lambda: {"": sample()}


def seconds(action: Callable[[], object]) -> float:
    """Returns how long one call takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def load(name: str) -> Figure:
    """Returns how many processes wanted a processor in the last minute: beside much else, figures say little."""
    return Figure(name, os.getloadavg()[0], "processes", None)


def show(figures: list[Figure], title: str) -> None:
    """Prints the table."""
    table = Table(title=title, title_justify="left")
    for column in ("figure", "value", "unit", "aim", "reached"):
        table.add_column(column, justify="left" if column in ("figure", "unit") else "right", overflow="fold")
    for figure in figures:
        sign = "<=" if figure.better == "lower" else ">="
        aim = "" if figure.aim is None else f"{sign} {figure.aim:g}"
        reached = {None: "", True: "[green]yes[/]", False: "[red]no[/]"}[figure.reached]
        table.add_row(figure.name, f"{figure.value:.4g}", figure.unit, aim, reached)
    Console().print(table)


def write(figures: list[Figure], path: Path, command: str) -> None:
    """Writes the list as JSON, in place of what the same command wrote before and beside what others have written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    had = json.loads(path.read_text()) if path.exists() else []
    kept = [entry for entry in had if entry.get("command") not in (command, None)]
    entries = kept + [{**dataclasses.asdict(figure), "command": command} for figure in figures]
    path.write_text(json.dumps(entries, indent=2) + "\n")
