"""The findings for people: a table by topic, and a line for each kind of arena."""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvharbor.gpumem.arena import ArenaKind
from kvharbor.server.doctor.check import Finding, State, obstacles

if TYPE_CHECKING:
    from rich.console import RenderableType

_STYLES = {State.OK: "green", State.WARN: "yellow", State.FAIL: "bold red", State.SKIPPED: "dim"}


def table_of(findings: Sequence[Finding]) -> "RenderableType":
    """Returns the table."""
    from rich.table import Table
    from rich.text import Text

    table = Table(padding=(0, 1, 0, 0))
    for heading in ("check", "state", "found", "what to change"):
        # Folded, not cut short: paths and UUIDs are there to be copied.
        table.add_column(heading, overflow="fold", no_wrap=heading in ("check", "state"))
    for _, topic in itertools.groupby(findings, key=lambda finding: finding.check.partition(".")[0]):
        for finding in topic:
            # As text, not as markup: what errors say may have brackets.
            table.add_row(
                Text(finding.check),
                Text(finding.state, style=_STYLES[finding.state]),
                Text(finding.found),
                Text(finding.remedy),
            )
        table.add_section()
    return table


def conclusion(findings: Sequence[Finding], chosen: ArenaKind) -> list[str]:
    """Returns a line for each kind of arena, the chosen one first."""
    kinds = sorted(ArenaKind, key=lambda kind: kind is not chosen)
    return [_verdict(findings, kind, "the chosen arena" if kind is chosen else "arena") for kind in kinds]


def _verdict(findings: Sequence[Finding], kind: ArenaKind, called: str) -> str:
    in_the_way = obstacles(findings, kind)
    if not in_the_way:
        return f"{called} {kind}: works here"
    verdict = "cannot be told" if all(found.open for found in in_the_way) else "does not work here"
    return f"{called} {kind}: {verdict}, see {', '.join(found.check for found in in_the_way)}"
