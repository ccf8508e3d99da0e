"""`kvharbor stats`: who holds how many blocks."""

import dataclasses
import json
import time
from typing import TYPE_CHECKING, Annotated

import typer

from kvharbor.server.commands.engine_table import engine_table
from kvharbor.server.commands.options import JsonOption, SocketOption, TenantOption, connected
from kvharbor.server.errors import CommandError
from kvharbor.server.sizes import format_size

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvharbor.client import Harbor, PoolStats, ServiceStats, TimeHistogram

_CLASSES = ("free", "reserved", "active", "cached", "warm", "quarantined")


def stats(
    misplaced: Annotated[str | None, typer.Argument(metavar="", hidden=True)] = None,
    pool: Annotated[str | None, typer.Option("--pool", help="Only the pool of this name.")] = None,
    as_json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", help="Again and again, until interrupted.")] = False,
    interval_s: Annotated[float, typer.Option("--interval-s", min=0.1, help="Pause between two.")] = 1.0,
    tenant: TenantOption = None,
    socket: SocketOption = None,
) -> None:
    """Shows one consistent snapshot of each pool.

    Every block is in one class: free; reserved (held, not committed); active (committed and held); cached
    (committed, held by nobody: evictable, still a hit); warm (pinned); quarantined (of a session that is
    lost or has still to resume).
    Reusable is what a pool of any size could have reused of the prompt tokens, at most; it and the times are
    estimated from a sample. The sessions are those of others: this command's own is not counted.
    Engines are told with what each has reused of whom since the service's process began, sessions that have ended
    included.
    """
    if misplaced is not None:
        # Other commands take the pool like this.
        raise CommandError(f"stats shows all pools: for one of them write --pool {misplaced}")
    with connected(socket) as harbor:
        if as_json:
            typer.echo(json.dumps(dataclasses.asdict(_snapshot(harbor, pool, tenant))))
            while watch:
                time.sleep(interval_s)
                typer.echo(json.dumps(dataclasses.asdict(_snapshot(harbor, pool, tenant))))
            return

        from rich.console import Console
        from rich.live import Live

        console = Console()
        if not watch:
            console.print(_table(_snapshot(harbor, pool, tenant)))
            return
        with Live(_table(_snapshot(harbor, pool, tenant)), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(interval_s)
                live.update(_table(_snapshot(harbor, pool, tenant)), refresh=True)


def _snapshot(harbor: "Harbor", pool: str | None, tenant: str | None) -> "ServiceStats":
    snapshot = harbor.stats(pool, tenant)
    # Over TCP the command has no session.
    own_count = 1 if harbor.session_id else 0
    return dataclasses.replace(snapshot, session_count=snapshot.session_count - own_count)


def _table(snapshot: "ServiceStats") -> "RenderableType":
    from rich.console import Group
    from rich.table import Table

    sessions = "1 session" if snapshot.session_count == 1 else f"{snapshot.session_count:,} sessions"
    if not snapshot.pools:
        return f"no pools; {sessions}"
    table = Table(title=sessions, title_justify="left")
    table.add_column("pool\ntenant")
    for pool in snapshot.pools:
        table.add_column(f"{pool.name}\n{pool.tenant}", justify="right")
    columns = [_cells(pool) for pool in snapshot.pools]
    for name in columns[0]:
        table.add_row(name, *(cells[name] for cells in columns), end_section=name in ("total", "shared"))
    return Group(table, *(engine_table(pool) for pool in snapshot.pools if pool.engines))


def _reusable(pool: "PoolStats") -> str:
    counters = pool.counters
    if not counters.prompt_token_count:
        return "0"
    most = min(counters.reused_token_count + pool.traffic.recomputed_token_count, counters.prompt_token_count)
    return f"~{most:,} ({most / counters.prompt_token_count:.0%})"


def _half_within(times: "TimeHistogram") -> str:
    """Says within which time half of the blocks were, as far as that is known."""
    if not any(times.counts):
        return "-"
    bound_s = times.bound_of(0.5)
    return "later" if bound_s is None else f"half within {bound_s:g} s"


def _misses(misses: dict[str, int]) -> str:
    """Names the reasons that were given, the most frequent first."""
    given = sorted(((count, kind) for kind, count in misses.items() if count), reverse=True)
    return "\n".join(f"{count:,} {kind.replace('_', ' ')}" for count, kind in given) or "-"


def _cells(pool: "PoolStats") -> dict[str, str]:
    cells = {
        f"{name} blocks": f"{count:,} ({format_size(count * pool.block_bytes)})"
        for name in _CLASSES
        for count in [getattr(pool, f"{name}_block_count")]
    }
    cells["total"] = f"{pool.total_block_count:,} ({format_size(pool.total_bytes)})"
    cells["shared"] = f"{pool.shared_block_count:,}"
    counters = pool.counters
    prompt_tokens = counters.prompt_token_count
    reused = f" ({counters.reused_token_count / prompt_tokens:.0%})" if prompt_tokens else ""
    return {
        **cells,
        "sequences": f"{pool.sequence_count:,}",
        "waiting": f"{pool.waiting_count:,}",
        "pins": f"{pool.pin_count:,}",
        "warm tasks": f"{pool.warm_task_waiting_count:,} waiting, {pool.warm_task_filling_count:,} filling",
        "prompt tokens": f"{prompt_tokens:,}",
        "reused tokens": f"{counters.reused_token_count:,}{reused}",
        "reusable tokens": _reusable(pool),
        "asked again": _half_within(pool.traffic.reuse_gaps),
        "evicted after": _half_within(pool.traffic.residences),
        "misses": _misses(pool.traffic.misses),
        "evicted blocks": f"{counters.evicted_block_count:,}",
        "refused calls": f"{counters.refused_count:,}",
    }
