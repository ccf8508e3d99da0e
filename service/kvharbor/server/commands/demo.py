"""`kvharbor demo`: three workers with a real model, one shared prefix."""

from typing import Annotated

import typer

from kvharbor.server.errors import CommandError


def demo(
    as_json: Annotated[
        bool, typer.Option("--json", help="Ends standard output with one JSON object; the rest goes to stderr.")
    ] = False,
) -> None:
    """Starts a service and three workers with SmolLM2, asks them questions, and shows what sharing saves."""
    try:
        from kvharbor.demo.processes import DemoFailed
        from kvharbor.demo.run import run
    except ModuleNotFoundError as missing:
        raise CommandError(f"the demo needs {missing.name}: pip install 'kvharbor[demo]'") from None
    try:
        run(as_json=as_json)
    except DemoFailed as failed:
        raise CommandError(str(failed)) from None
