"""What a run has found: written as JSON, shown as a table, and judged."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

MOST_GROWTH_BYTES = 16 * 1024 * 1024
"""Of supervisor and child together: each restart's heap has a size of its own."""


@dataclass(slots=True)
class Report:
    """The figures of a run. Times are in seconds; None where nothing was measured."""

    seed: int
    duration_s: float = 0.0
    worker_kills: int = 0
    worker_stops: int = 0
    owner_kills: int = 0
    owner_stops: int = 0
    standby_kills: int = 0
    upgrades: int = 0
    supervisor_kills: int = 0
    marked_kills: dict[str, int] = field(default_factory=dict)
    acts: int = 0
    allocations: int = 0
    hits_verified: int = 0
    blocks_verified: int = 0
    tails_verified: int = 0
    forks: int = 0
    adoptions: int = 0
    warmups: int = 0
    shadows_switched: int = 0
    engine_acts: int = 0
    engine_acquires: int = 0
    engine_hits_verified: int = 0
    engine_blocks_verified: int = 0
    engine_opaque_blocks_verified: int = 0
    engine_resumed_blocks_verified: int = 0
    engine_committed_blocks: int = 0
    engine_leased_blocks: int = 0
    engine_released_blocks: int = 0
    engine_waits: int = 0
    engine_grants: int = 0
    engine_pending_seen: int = 0
    engine_stood_back: int = 0
    engine_holdings_compared: int = 0
    engine_recalls: int = 0
    engine_invalidated_blocks: int = 0
    engine_invalidations_refused: int = 0
    engine_bumps: int = 0
    engine_streams_replaced: int = 0
    decode_steps: int = 0
    decoded_tokens: int = 0
    decoded_blocks_verified: int = 0
    refusals: int = 0
    calls_without_owner: int = 0
    evicted_blocks: int = 0
    wrong_bytes: int = 0
    leaked_blocks: int = 0
    lost_committed_blocks: int = 0
    lost_blocks: int = 0
    lost_sequences: int = 0
    lost_sessions: int = 0
    left_private_blocks: int = 0
    new_epochs: int = 0
    invariants_checked: int = 0
    indexes_compared: int = 0
    index_entries_compared: int = 0
    reclaim_samples: int = 0
    reclaim_p50_s: float | None = None
    reclaim_p99_s: float | None = None
    reclaim_across_restart_p50_s: float | None = None
    reclaim_across_restart_p99_s: float | None = None
    reclaim_resolution_s: float = 0.0
    recovery_samples: int = 0
    recovery_p50_s: float | None = None
    recovery_p99_s: float | None = None
    recovery_standby_p50_s: float | None = None
    recovery_standby_p99_s: float | None = None
    outage_p99_s: float | None = None
    cold_start_p99_s: float | None = None
    rss_growth_bytes: int = 0
    fd_growth: int = 0
    faults: list[str] = field(default_factory=list)

    def judge(self) -> bool:
        """Adds a fault for each promise that a figure breaks; returns whether there is none."""
        for name in ("wrong_bytes", "leaked_blocks", "left_private_blocks", "fd_growth"):
            if value := getattr(self, name):
                self.faults.append(f"{name} is {value}, must be 0")
        if not self.supervisor_kills:
            for name in ("lost_committed_blocks", "lost_blocks", "lost_sequences", "lost_sessions"):
                if value := getattr(self, name):
                    self.faults.append(f"{name} is {value}, must be 0 as no supervisor was killed")
        if self.rss_growth_bytes > MOST_GROWTH_BYTES:
            self.faults.append(f"rss_growth_bytes is {self.rss_growth_bytes}, at most {MOST_GROWTH_BYTES}")
        return not self.faults

    def write(self, path: Path) -> None:
        """Writes JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    def show(self) -> None:
        """Prints the table, and the faults below it."""
        table = Table(title=f"kvharbor chaos, seed {self.seed}", title_justify="left", show_header=False)
        table.add_column("figure")
        table.add_column("value", justify="right")
        for name, value in dataclasses.asdict(self).items():
            if name == "marked_kills":
                for mark, count in sorted(value.items()):
                    table.add_row(f"killed at {mark}", str(count))
            elif name not in ("seed", "faults"):
                table.add_row(name, f"{value:.3f}" if isinstance(value, float) else str(value))
        console = Console()
        console.print(table)
        for fault in self.faults:
            console.print(f"[red]fault[/]: {fault}", highlight=False)
