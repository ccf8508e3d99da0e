"""The table of engines, for people."""

import io
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from kvharbor.client import Engine, EngineReuse, EngineStats
from kvharbor.server.commands.engine_table import engine_table


def shown(*names: str) -> str:
    """The table of engines of these names, each of which reuses of the one before."""
    engines = [
        EngineStats(Engine(name, "1", "end\\"), "", 1, 32, 16, (EngineReuse((place - 1) % len(names), 16),), 0, 1)
        for place, name in enumerate(names)
    ]
    pool: Any = SimpleNamespace(name="p", engines=engines)
    console = Console(file=io.StringIO(), width=120)
    console.print(engine_table(pool))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_names_are_shown_as_they_are() -> None:
    """No markup, and no code for a picture."""
    names = ["[red]x[/red]", ":cat:", "\\[b]", "plain"]
    text = shown(*names)
    for name in names:
        assert text.count(f"│ {name} 1 end\\ ") == 1
        assert text.count(f"│   of {name} 1 end\\ ") == 1
