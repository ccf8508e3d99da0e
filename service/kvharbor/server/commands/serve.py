"""`kvharbor serve`: a flag for every setting, except the tables, which belong in a file."""

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

_Text = str | None


def serve(
    config: Annotated[Path | None, typer.Option(help="TOML file with settings. Also KVHARBOR_CONFIG.")] = None,
    socket: Annotated[_Text, typer.Option(help="Path of the Unix socket for gRPC.")] = None,
    socket_mode: Annotated[_Text, typer.Option(help="File mode of the sockets, e.g. 0660.")] = None,
    socket_group: Annotated[_Text, typer.Option(help="Group of the sockets.")] = None,
    listen: Annotated[_Text, typer.Option(help="HOST:PORT for gRPC over TCP beside the socket; port 0: any.")] = None,
    memory: Annotated[_Text, typer.Option(help="Memory for all pools: 2GiB, 2GB or 80%.")] = None,
    warm_budget_ratio: Annotated[_Text, typer.Option(help="Part of a pool that warm pins may hold.")] = None,
    min_reuse_tokens: Annotated[_Text, typer.Option(help="Matches shorter than this are not reused.")] = None,
    anonymous_tenant: Annotated[_Text, typer.Option(help="Tenant of callers without a session.")] = None,
    handoff_ttl_s: Annotated[_Text, typer.Option(help="Seconds that a hand-off waits for its Adopt.")] = None,
    hello_timeout_s: Annotated[_Text, typer.Option(help="Seconds that a side socket has to say hello.")] = None,
    watch_backlog: Annotated[_Text, typer.Option(help="Events kept a pool for watchers, e.g. 4MiB.")] = None,
    watch_progress_s: Annotated[_Text, typer.Option(help="Seconds after which an idle watch gets progress.")] = None,
    max_message_bytes: Annotated[_Text, typer.Option(help="Largest gRPC message.")] = None,
    max_sessions: Annotated[_Text, typer.Option(help="Side sockets open at a time.")] = None,
    grace_s: Annotated[_Text, typer.Option(help="Seconds that calls in flight have at shutdown.")] = None,
    log_level: Annotated[_Text, typer.Option(help="debug, info, warning or error.")] = None,
    log_format: Annotated[_Text, typer.Option(help="json or console.")] = None,
) -> None:
    """Owns the memory and serves it, until SIGTERM.

    Flags win over the environment (KVHARBOR_NAME), that over the file, that over the defaults.
    """
    flags = {name: value for name, value in locals().items() if name != "config"}
    # Until the service handles signals itself, SIGTERM unwinds what has been set up so far.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

    from kvharbor.server.logs import configure
    from kvharbor.server.sources import load_settings

    # Settings first: a mistake in them is told before the slower imports.
    loaded = load_settings(flags, os.environ, config)
    configure(loaded.settings.log_level, loaded.settings.log_format)

    from kvharbor.server.service import serve as run

    run(loaded)
