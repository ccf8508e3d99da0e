"""`kvharbor record`: a trace of what a live service is asked."""

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvharbor.server.commands.options import PoolArgument, SocketOption, TenantOption, connected
from kvharbor.server.errors import CommandError

if TYPE_CHECKING:
    from kvharbor.client import Recording
    from kvharbor.server.traces.recording import Recorded


def record(
    pool: PoolArgument,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it; as gzip if the name ends with .gz.")],
    for_s: Annotated[
        float | None, typer.Option("--for", min=0.001, max=1e6, help="Seconds after which to end. Unset: when told to.")
    ] = None,
    tenant: TenantOption = None,
    socket: SocketOption = None,
) -> None:
    """Writes the requests of a pool as a trace for `kvharbor replay`, until interrupted. For administrators.

    A request is written when it ends; those that still run when the recording ends are not in it. Blocks have names
    under a secret that the service forgets with the recording, and tokens are in none. When the service's process ends,
    the recording ends with exit status 1; what it has written is whole.
    """
    from kvharbor.server.traces.recording import write

    with connected(socket) as harbor, harbor.find_pool(pool, tenant).record() as recording:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: recording.close())
        if for_s is not None:
            timer = threading.Timer(for_s, recording.close)
            timer.daemon = True
            timer.start()
        typer.echo(f"recording pool {pool}; interrupt to end", err=True)
        try:
            write(file, recording.block_tokens, _requests(recording))
        except OSError as failure:
            raise CommandError(f"cannot write {file}: {failure.strerror}") from None


def _requests(recording: "Recording") -> "Iterator[Recorded]":
    from kvharbor.server.traces.recording import Recorded

    for one in recording:
        yield Recorded(
            arrival_ms=round(one.arrival_s * 1000),
            input_tokens=one.input_tokens,
            output_tokens=one.output_tokens,
            duration_ms=round(one.duration_s * 1000),
            block_hashes=tuple(name.hex() for name in one.block_names),
        )
