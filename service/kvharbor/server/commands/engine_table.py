"""Who computes in a pool, and what each reuses of whom, as a table for people."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from kvharbor.client import EngineStats, PoolStats

_MOST_SOURCES = 5
"""Those that an engine reuses most of have a row each; the rest share one."""


def engine_table(pool: "PoolStats") -> "Table":
    """Returns a row for each engine and each group, and below it those that it reuses of, most first."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    # Names may be anything that can be printed: no markup.
    table = Table(title=f"engines of {pool.name}", title_justify="left")
    table.add_column("engine", overflow="fold")
    for name in ("sessions", "held\nblocks", "published\nblocks", "prompt\ntokens", "reused\ntokens"):
        table.add_column(name, justify="right", overflow="fold")
    for place, one in enumerate(pool.engines):
        table.add_row(
            Text(_name(one)),
            f"{one.session_count:,}",
            f"{one.held_block_count:,}",
            f"{one.committed_block_count:,}",
            f"{one.prompt_token_count:,}",
            f"{one.reused_token_count:,}{_share(one)}",
        )
        for name, token_count in _sources(pool, place):
            # A name that takes several lines stays below its engine on all of them.
            table.add_row(Padding(Text(f"of {name}"), (0, 0, 0, 2)), "", "", "", "", f"{token_count:,}")
    return table


def _name(one: "EngineStats") -> str:
    # Each has an instance but all of one name and version that are told together.
    several = "" if one.group or one.engine.instance else " (several)"
    return one.group or f"{one.engine}{several}"


def _share(one: "EngineStats") -> str:
    return f" ({one.reused_token_count / one.prompt_token_count:.0%})" if one.prompt_token_count else ""


def _sources(pool: "PoolStats", place: int) -> Iterator[tuple[str, int]]:
    most_first = sorted(pool.engines[place].reuses, key=lambda reuse: -reuse.token_count)
    for reuse in most_first[:_MOST_SOURCES]:
        index = reuse.engine_index
        yield "itself" if index == place else _name(pool.engines[index]), reuse.token_count
    if rest := most_first[_MOST_SOURCES:]:
        yield f"{len(rest)} more", sum(reuse.token_count for reuse in rest)
