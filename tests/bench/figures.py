"""A figure, its aim, and how a list of them is shown and kept."""

import dataclasses
import json
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
    taken: dict[str, list[float]] = {name: [] for name in samples}
    for _ in range(rounds):
        for name, sample in samples.items():
            taken[name].append(sample())
    return {name: median(values) for name, values in taken.items()}


def seconds(action: Callable[[], object]) -> float:
    """Returns how long one call takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def show(figures: list[Figure]) -> None:
    """Prints the table."""
    table = Table(title="kvharbor bench", title_justify="left")
    for column in ("figure", "value", "unit", "aim", "reached"):
        table.add_column(column, justify="left" if column in ("figure", "unit") else "right")
    for figure in figures:
        sign = "<=" if figure.better == "lower" else ">="
        aim = "" if figure.aim is None else f"{sign} {figure.aim:g}"
        reached = {None: "", True: "[green]yes[/]", False: "[red]no[/]"}[figure.reached]
        table.add_row(figure.name, f"{figure.value:.4g}", figure.unit, aim, reached)
    Console().print(table)


def write(figures: list[Figure], path: Path) -> None:
    """Writes the list as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = [dataclasses.asdict(figure) for figure in figures]
    path.write_text(json.dumps(entries, indent=2) + "\n")
