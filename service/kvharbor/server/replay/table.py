"""Outcomes as a table for people."""

from collections.abc import Sequence

from rich.table import Table

from kvharbor.server.replay.policies import OPTIMUM
from kvharbor.server.replay.run import Outcome
from kvharbor.server.traces.trace import Trace


def table_of(trace: Trace, outcomes: Sequence[Outcome]) -> Table:
    """Returns a row for each outcome, in their order, in sections of one capacity."""
    best = {one.setting.block_count: one.hit_block_count for one in outcomes if one.setting.policy == OPTIMUM}
    table = Table(title=_title(trace, outcomes), title_justify="left")
    table.add_column("policy", no_wrap=True)
    # Headings of two lines: the table fits into 80 columns, and no figure is cut.
    for heading in ("blocks", "% of\ndistinct", "hit\nblocks", "hit\nrate", "% of\noptimum", "evictions"):
        table.add_column(heading, justify="right", no_wrap=True)
    for place, one in enumerate(outcomes, start=1):
        capacity = one.setting.block_count
        is_last = place == len(outcomes) or outcomes[place].setting.block_count != capacity
        table.add_row(
            one.setting.policy,
            f"{capacity:,}",
            f"{capacity / trace.unique_block_count:.1%}",
            f"{one.hit_block_count:,}",
            f"{one.hit_ratio:.4f}",
            f"{one.hit_block_count / best[capacity]:.1%}" if best.get(capacity) else "",
            f"{one.evicted_block_count:,}",
            end_section=is_last,
        )
    return table


def _title(trace: Trace, outcomes: Sequence[Outcome]) -> str:
    return (
        f"{trace.name}, {outcomes[0].setting.mode.value}: {len(trace.requests):,} requests ask for"
        f" {trace.asked_block_count:,} blocks of {trace.block_tokens} tokens,"
        f" {trace.unique_block_count:,} distinct; with memory without end {trace.hit_ceiling:.4f} would be hits"
    )
