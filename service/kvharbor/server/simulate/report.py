"""What a simulation found, for people and for programs."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from kvharbor.server.replay.modes import Course
from kvharbor.server.simulate.fits import Fit
from kvharbor.server.simulate.room import Room
from kvharbor.server.sizes import format_size


@dataclass(frozen=True, slots=True)
class Finding:
    """One layout's. `needed_bytes`: of KV, for the concurrency asked for. `course`: where requests have arrivals."""

    fit: Fit
    needed_bytes: int | None
    course: Course | None

    def record(self) -> dict[str, object]:
        """Returns it as programs get it; what was not asked for is null."""
        fit, course = self.fit, self.course
        request_count = self.fit.served_count
        return {
            "layout": fit.layout.name,
            "unit_tokens": fit.layout.unit_tokens,
            "at_once": fit.mean_count,
            "at_once_least": fit.least_count,
            "at_once_most": fit.most_count,
            "whole_trace_fits": fit.is_all,
            "written_bytes": fit.written_bytes,
            "unused_bytes": fit.unused_bytes,
            "left_over_bytes": fit.left_over_bytes,
            "too_long_requests": fit.too_long_count,
            "needed_bytes": self.needed_bytes,
            "waited_requests": course.waited_request_count if course else None,
            "mean_wait_ms": course.waited_ms / request_count if course and request_count else None,
        }


def table_of(room: Room, findings: Sequence[Finding], concurrency: int | None) -> Table:
    """Returns a row for each layout."""
    table = Table(title=_title(room), title_justify="left", box=None, padding=(0, 1, 0, 0))
    rows = [_cells(room, finding, concurrency) for finding in findings]
    for place, heading in enumerate(rows[0]):
        table.add_column(heading.replace(" ", "\n"), justify="right" if place else "left", no_wrap=True)
    for cells in rows:
        table.add_row(*cells.values())
    return table


def _title(room: Room) -> str:
    return (
        f"{format_size(room.kv_bytes)} for KV, room for {room.unit_count(1):,} tokens of {room.token_bytes:,} bytes;"
        " requests at their full length"
    )


def _cells(room: Room, finding: Finding, concurrency: int | None) -> dict[str, str]:
    fit = finding.fit
    cells = {
        "layout": fit.layout.name,
        "at once": _count(fit),
        "written": f"{fit.written_bytes / room.kv_bytes:.0%}",
        "unused": f"{fit.unused_bytes / room.kv_bytes:.0%}",
        "left over": f"{fit.left_over_bytes / room.kv_bytes:.0%}",
        "too long": f"{fit.too_long_count:,}",
    }
    if concurrency is not None and finding.needed_bytes is not None:
        cells[f"{concurrency:,} need"] = format_size(finding.needed_bytes)
    if finding.course is not None:
        waited, served = finding.course.waited_request_count, max(fit.served_count, 1)
        cells["wait"] = f"{waited / served:.0%}"
        cells["mean wait"] = f"{finding.course.waited_ms / served / 1000:,.1f} s"
    return cells


def _count(fit: Fit) -> str:
    if not fit.served_count:
        return "none"
    if fit.is_all:
        return f"all {fit.most_count:,}"
    if fit.least_count == fit.most_count:
        return f"{fit.most_count:,}"
    return f"{fit.mean_count:,.1f} ({fit.least_count:,}-{fit.most_count:,})"
