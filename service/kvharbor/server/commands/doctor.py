"""`kvharbor doctor`: what works here, what does not, and what to change."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvharbor.server.errors import CommandError, StartupError

if TYPE_CHECKING:
    from kvharbor.gpumem.arena import ArenaKind
    from kvharbor.server.doctor.surroundings import Surroundings

_EXIT_UNUSABLE = 2


def doctor(
    arena: Annotated[
        str | None,
        typer.Option(help="The arena that must work: host, cuda_ipc or cuda_vmm. Default: that of the settings."),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with settings. Also KVHARBOR_CONFIG.")] = None,
    socket: Annotated[str | None, typer.Option(help="Where a service is expected: a socket path or HOST:PORT.")] = None,
    attach: Annotated[
        bool, typer.Option("--attach", help="Also be a worker of that service: open a small pool, map it, drop it.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list instead of a table.")] = False,
) -> None:
    """Looks at packages, kernel, limits, driver and devices, and tries each arena between two processes.

    Run it where the service is to run, as its user and with its settings; it needs no service. Exits with 1 if
    something fails that the arena needs; other failures and warnings are only shown.
    """
    from kvharbor.server.doctor.check import obstacles
    from kvharbor.server.doctor.examination import examined

    around = _surroundings(arena, config, socket, attach=attach)
    findings = list(examined(around))
    if as_json:
        typer.echo(json.dumps([finding.as_json() for finding in findings], ensure_ascii=False, indent=1))
    else:
        from rich.console import Console

        from kvharbor.server.doctor.report import conclusion, table_of

        Console().print(table_of(findings))
        typer.echo("\n".join(conclusion(findings, around.arena)))
    if obstacles(findings, around.arena):
        raise typer.Exit(1)


def _surroundings(arena: str | None, config: Path | None, socket: str | None, *, attach: bool) -> "Surroundings":
    from kvharbor.gpumem.arena import ArenaKind
    from kvharbor.server.configuration.settings import Settings
    from kvharbor.server.configuration.sources import load_settings
    from kvharbor.server.doctor.place import place_of
    from kvharbor.server.doctor.surroundings import Surroundings

    failure = ""
    try:
        settings = load_settings({}, os.environ, config).settings
    except StartupError as refused:
        settings, failure = Settings(), str(refused)
    root = Path("/")
    return Surroundings(
        root=root,
        environment=os.environ,
        place=place_of(root, os.environ),
        settings=settings,
        settings_failure=failure,
        arena=ArenaKind(settings.arena_kind) if arena is None else _named(arena),
        socket=socket,
        attach=attach,
    )


def _named(arena: str) -> "ArenaKind":
    from kvharbor.gpumem.arena import ArenaKind

    try:
        return ArenaKind(arena)
    except ValueError:
        known = ", ".join(ArenaKind)
        raise CommandError(f"there is no arena {arena!r}: name one of {known}", status=_EXIT_UNUSABLE) from None
