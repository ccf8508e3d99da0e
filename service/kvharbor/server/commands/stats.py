"""`kvharbor stats`: who holds how many blocks."""

import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from kvharbor.server.commands.engine_table import engine_table
from kvharbor.server.commands.options import JsonOption, SocketOption, TenantOption, connected, seconds
from kvharbor.server.sizes import format_size

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from kvharbor.client import Harbor, PoolStats, ServiceStats, TimeHistogram

_CLASSES = ("free", "reserved", "active", "cached", "warm", "quarantined")
_UNBOUNDED = 1_000_000
"""Columns that no table has."""


def stats(
    pool: Annotated[str | None, typer.Argument(metavar="POOL", help="Only the pool of this name.")] = None,
    as_json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", help="Again and again, until interrupted.")] = False,
    interval_s: Annotated[
        float, typer.Option("--interval-s", parser=seconds(0.1), help="Pause between two, in seconds.")
    ] = 1.0,
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
    with connected(socket) as harbor:
        snapshots = _snapshots(harbor, pool, tenant, interval_s=interval_s if watch else None)
        with suppress(KeyboardInterrupt) if watch else nullcontext():
            if as_json:
                for snapshot in snapshots:
                    typer.echo(json.dumps(dataclasses.asdict(snapshot)))
            else:
                _draw(snapshots, over_the_last=watch)


def _draw(snapshots: "Iterator[ServiceStats]", *, over_the_last: bool) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if not over_the_last:
        for snapshot in snapshots:
            console.print(_shown(snapshot, console))
        return
    with Live(console=console, auto_refresh=False) as live:
        for snapshot in snapshots:
            live.update(_shown(snapshot, console), refresh=True)


def _snapshots(
    harbor: "Harbor", pool: str | None, tenant: str | None, *, interval_s: float | None
) -> "Iterator[ServiceStats]":
    """Yields one, and without end if they are wanted at an interval."""
    yield _snapshot(harbor, pool, tenant)
    while interval_s is not None:
        time.sleep(interval_s)
        yield _snapshot(harbor, pool, tenant)


def _snapshot(harbor: "Harbor", pool: str | None, tenant: str | None) -> "ServiceStats":
    from kvharbor.client import PoolNotFound

    try:
        snapshot = harbor.stats(pool, tenant)
    except PoolNotFound:
        _require_told(harbor)
        raise
    if not snapshot.pools:
        _require_told(harbor)
    # Over TCP the command has no session.
    own_count = 1 if harbor.session_id else 0
    return dataclasses.replace(snapshot, session_count=snapshot.session_count - own_count)


def _require_told(harbor: "Harbor") -> None:
    """Raises SessionRequired where pools are not told of to callers without a session, which is not to have none."""
    harbor.list_pools()


def _shown(snapshot: "ServiceStats", console: "Console") -> "RenderableType":
    from rich.console import Group

    sessions = "1 session" if snapshot.session_count == 1 else f"{snapshot.session_count:,} sessions"
    if not snapshot.pools:
        return f"no pools; {sessions}"
    engines = (engine_table(pool) for pool in snapshot.pools if pool.engines)
    return Group(sessions, *_tables(snapshot.pools, console), *engines)


def _tables(pools: Sequence["PoolStats"], console: "Console") -> Iterator["Table"]:
    """Yields as many tables as it takes to show each pool in full, each as wide as the console lets it be."""
    unbounded = console.options.update(max_width=_UNBOUNDED)
    first = 0
    for end in range(1, len(pools) + 1):
        wider = _table(pools[first : end + 1])
        if end < len(pools) and console.measure(wider, options=unbounded).maximum <= console.width:
            continue
        yield _table(pools[first:end])
        first = end


def _table(pools: Sequence["PoolStats"]) -> "Table":
    from rich.table import Table

    # One pool may be too wide by itself: its name is folded, not cut short.
    table = Table()
    table.add_column("pool\ntenant", overflow="fold")
    for pool in pools:
        table.add_column(f"{pool.name}\n{pool.tenant}", justify="right", overflow="fold")
    columns = [_cells(pool) for pool in pools]
    for name in columns[0]:
        table.add_row(name, *(cells[name] for cells in columns), end_section=name in ("total", "shared"))
    return table


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
