"""`kvharbor record`: a trace of what a live service is asked."""

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvharbor.server.commands.options import (
    ForceOption,
    PoolArgument,
    SocketOption,
    TenantOption,
    connected,
    require_new,
)
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
    force: ForceOption = False,
    tenant: TenantOption = None,
    socket: SocketOption = None,
) -> None:
    """Writes the requests of a pool as a trace for `kvharbor replay`, until interrupted. For administrators.

    A request is written when it ends; those that still run when the recording ends are not in it. A second interrupt
    does not wait for the service to tell the last ones, and a third one not for its farewell. Blocks have names under a
    secret that the service forgets with the recording, and tokens are in none. When the service's process ends, the
    recording ends with exit status 1; what it has written is whole.
    """
    from kvharbor.server.traces.recording import write

    require_new(file, force=force)
    with connected(socket) as harbor, harbor.find_pool(pool, tenant).record() as recording:
        _on_interrupts(recording.stop, recording.close)
        if for_s is not None:
            timer = threading.Timer(for_s, recording.stop)
            timer.daemon = True
            timer.start()
        try:
            write(file, recording.block_tokens, _requests(recording, pool, file))
        except OSError as failure:
            raise CommandError(f"cannot write {file}: {failure.strerror}") from None


def _on_interrupts(*acts: Callable[[], None]) -> None:
    """Has each SIGINT or SIGTERM do the next one of these, and those behind them end the process."""
    numbers, left = (signal.SIGINT, signal.SIGTERM), list(acts)

    def act(*_: object) -> None:
        if len(left) == 1:
            for number in numbers:
                signal.signal(number, signal.SIG_DFL)
        left.pop(0)()

    for number in numbers:
        signal.signal(number, act)


def _requests(recording: "Recording", pool: str, file: Path) -> "Iterator[Recorded]":
    """Yields the requests until the recording ends, and tells how many there were, also where the service has gone."""
    from kvharbor.client import HarborError
    from kvharbor.server.traces.recording import Recorded

    # Not sooner: by now the file is open.
    typer.echo(f"recording pool {pool}; interrupt to end", err=True)
    count = 0
    try:
        for one in recording:
            count += 1
            yield Recorded(
                arrival_ms=round(one.arrival_s * 1000),
                input_tokens=one.input_tokens,
                output_tokens=one.output_tokens,
                duration_ms=round(one.duration_s * 1000),
                block_hashes=tuple(name.hex() for name in one.block_names),
            )
    except HarborError:
        _tell(file, count, recording)
        raise
    _tell(file, count, recording)


def _tell(file: Path, count: int, recording: "Recording") -> None:
    # Not on stdout, which may be the file.
    typer.echo(f"{file}: {count:,} requests, in blocks of {recording.block_tokens}", err=True)
