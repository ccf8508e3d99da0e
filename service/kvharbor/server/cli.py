"""The command `kvharbor`. Each command imports what it needs when it runs: help must come at once."""

import sys
from typing import Annotated, NoReturn

import typer

from kvharbor.server.commands.demo import demo
from kvharbor.server.commands.doctor import doctor
from kvharbor.server.commands.drop import drop
from kvharbor.server.commands.execute import execute
from kvharbor.server.commands.generate_trace import generate_trace
from kvharbor.server.commands.health import health
from kvharbor.server.commands.kill_session import kill_session
from kvharbor.server.commands.options import in_own_words
from kvharbor.server.commands.prefixes import lookup, unwarm, warm
from kvharbor.server.commands.record import record
from kvharbor.server.commands.replay import replay
from kvharbor.server.commands.serve import serve
from kvharbor.server.commands.sessions import sessions
from kvharbor.server.commands.simulate import simulate
from kvharbor.server.commands.stats import stats
from kvharbor.server.commands.upgrade import upgrade
from kvharbor.server.commands.watch import watch
from kvharbor.server.errors import CommandError, StartupError

EXIT_FAILED = 1
EXIT_UNUSABLE = 2

app = typer.Typer(
    name="kvharbor",
    help="One process owns a host's KV-cache memory; inference workers map it and share one prefix cache.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (
    serve,
    stats,
    lookup,
    warm,
    unwarm,
    drop,
    watch,
    sessions,
    upgrade,
    health,
    doctor,
    record,
    replay,
    simulate,
    demo,
):
    app.command()(command)
app.command("kill-session")(kill_session)
app.command("generate-trace")(generate_trace)
app.command("exec")(execute)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        typer.echo(f"kvharbor {metadata.version('kvharbor')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """The options of `kvharbor` itself."""


def main() -> NoReturn:
    """Runs the command line. What goes wrong is one line on stderr: exit status 2 at start-up [S13], else 1."""
    try:
        app()
    except StartupError as refused:
        _fail(refused, EXIT_UNUSABLE)
    except CommandError as refused:
        _fail(refused, refused.status)
    except Exception as failure:
        # The client is imported by the commands that need it, and only its errors mean an ordinary refusal.
        client = sys.modules.get("kvharbor.client")
        if client is None or not isinstance(failure, client.HarborError):
            raise
        _fail(in_own_words(failure), EXIT_FAILED)
    sys.exit(0)


def _fail(told: object, status: int) -> NoReturn:
    typer.echo(f"kvharbor: {told}", err=True)
    sys.exit(status)


if __name__ == "__main__":
    main()
