"""`kvharbor replay`: what a pool of some size would have done with a trace."""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvharbor.server.errors import CommandError
from kvharbor.server.replay.modes import Mode

if TYPE_CHECKING:
    from kvharbor.server.replay.run import Outcome, Setting
    from kvharbor.server.traces.trace import Trace


def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The trace, plain or gzip; docs/traces.md has formats.")],
    blocks: Annotated[
        list[str] | None,
        typer.Option("--blocks", help="Capacity: 1828, or 5% of the distinct blocks. Repeatable. Default: a sweep."),
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option("--policy", help="Which blocks go first. Repeatable. Default: every one.")
    ] = None,
    mode: Annotated[
        Mode, typer.Option("--mode", help="One request after the other, or in the trace's time, with room for outputs.")
    ] = Mode.SEQUENTIAL,
    block_tokens: Annotated[
        int | None, typer.Option("--block-tokens", min=1, help="Tokens a block. Default: as the trace has them, or 64.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list instead of table and picture.")] = False,
    svg: Annotated[Path | None, typer.Option("--svg", help="Writes the picture into this file, too.")] = None,
) -> None:
    """Replays a trace of requests through a pool in this process, without any service or memory for KV.

    The policy `min` is the offline optimum: what knowing the future would give, for comparison.
    """
    from kvharbor.server.replay.capacities import SWEEP, block_counts
    from kvharbor.server.replay.run import Setting
    from kvharbor.server.traces.reading import read_trace

    policies = _policies(policy)
    trace = read_trace(file, block_tokens)
    if not trace.unique_block_count:
        raise CommandError(f"{file}: no request has a whole block of {trace.block_tokens} tokens: ask for smaller ones")
    capacities = block_counts(blocks or SWEEP, trace.unique_block_count)
    if svg and len(capacities) < 2:
        raise CommandError("one capacity makes no curve for --svg: ask for two or more with --blocks")
    settings = [Setting(name, capacity, mode) for capacity in capacities for name in policies]
    outcomes = list(_outcomes(trace, settings))
    if as_json:
        typer.echo(json.dumps([one.record(trace.name) for one in outcomes]))
    else:
        _show(trace, outcomes)
    _tell_refused(outcomes)
    if svg:
        _write_svg(svg, trace, outcomes)


def _policies(asked: list[str] | None) -> list[str]:
    from kvharbor.server.replay.policies import NAMES

    unknown = [name for name in asked or () if name not in NAMES]
    if unknown:
        raise CommandError(f"no policy is named {unknown[0]!r}: choose from {', '.join(NAMES)}")
    return list(dict.fromkeys(asked or NAMES))


def _outcomes(trace: "Trace", settings: "Sequence[Setting]") -> "Iterator[Outcome]":
    """Replays each setting; tells on stderr how far it is, by a bar on a terminal and by lines elsewhere."""
    from rich.console import Console
    from rich.progress import Progress

    from kvharbor.server.replay.run import replay as replay_once

    terminal = Console(stderr=True)
    with Progress(console=terminal, transient=True, disable=not terminal.is_terminal) as progress:
        task = progress.add_task("", total=len(settings) * len(trace.requests))
        for done, setting in enumerate(settings):
            what = f"{setting.policy}, {setting.block_count:,} blocks"
            if progress.disable:
                typer.echo(f"{done + 1} of {len(settings)}: {what}", err=True)
            progress.update(task, description=what, completed=done * len(trace.requests))
            yield replay_once(trace, setting, partial(progress.track, task_id=task))


def _show(trace: "Trace", outcomes: "Sequence[Outcome]") -> None:
    from rich.console import Console

    from kvharbor.server.replay import terminal_chart
    from kvharbor.server.replay.curves import curves_of, frame_of
    from kvharbor.server.replay.table import table_of

    console = Console()
    console.print(table_of(trace, outcomes))
    curves = curves_of(outcomes)
    frame = frame_of(curves)
    if frame is not None:
        console.print("hit rate over capacity")
        console.print(terminal_chart.draw(curves, frame, min(console.width, 100)), soft_wrap=True)


def _tell_refused(outcomes: "Sequence[Outcome]") -> None:
    """Says which capacities are below what some requests need: their ratios are of little use."""
    refused = {one.setting.block_count: one.refused_request_count for one in outcomes if one.refused_request_count}
    for block_count, request_count in refused.items():
        typer.echo(f"{request_count:,} requests are larger than {block_count:,} blocks and were left out", err=True)


def _write_svg(file: Path, trace: "Trace", outcomes: "Sequence[Outcome]") -> None:
    from kvharbor.server.replay.curves import curves_of, frame_of
    from kvharbor.server.replay.svg_chart import svg

    curves = curves_of(outcomes)
    frame = frame_of(curves)
    assert frame is not None  # of one capacity no picture is asked for
    try:
        file.write_text(svg(f"{trace.name}, {outcomes[0].setting.mode.value}", curves, frame))
    except OSError as failure:
        raise CommandError(f"cannot write {file}: {failure.strerror}") from None
