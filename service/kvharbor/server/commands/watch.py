"""`kvharbor watch`: the index of a pool and its changes, a line each."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from kvharbor.server.commands.options import JsonOption, PoolArgument, SocketOption, connected

if TYPE_CHECKING:
    from kvharbor.client import WatchEvent


def watch(
    pool: PoolArgument,
    start_revision: Annotated[
        int, typer.Option("--from", min=0, help="Resume after this revision. 0: the whole index first.")
    ] = 0,
    as_json: JsonOption = False,
    socket: SocketOption = None,
) -> None:
    """Follows what is published, evicted and unpinned, until interrupted or the service's process ends."""
    with connected(socket) as harbor, harbor.find_pool(pool).watch(start_revision) as events:
        for event in events:
            typer.echo(json.dumps(_facts(event)) if as_json else _line(event))


def _facts(event: "WatchEvent") -> dict[str, object]:
    from kvharbor.client import BlocksRemoved, BlocksStored, PinEnded

    facts: dict[str, object] = {"revision": event.revision}
    if isinstance(event, BlocksStored):
        facts["stored"] = [digest.hex() for digest in event.digests]
        facts["parent"] = event.parent_digest.hex()
        facts["block_ids"] = list(event.block_ids)
        facts["generations"] = list(event.generations)
    elif isinstance(event, BlocksRemoved):
        facts["removed"] = [digest.hex() for digest in event.digests]
    elif isinstance(event, PinEnded):
        facts["pin_ended"] = event.name
        facts["expired"] = event.expired
    return facts


def _line(event: "WatchEvent") -> str:
    from kvharbor.client import BlocksRemoved, BlocksStored, PinEnded

    if isinstance(event, BlocksStored):
        what = f"stored   {len(event.digests)} blocks {_short(event.digests)} after {event.parent_digest.hex()[:12]}"
    elif isinstance(event, BlocksRemoved):
        what = f"removed  {len(event.digests)} blocks {_short(event.digests)}"
    elif isinstance(event, PinEnded):
        what = f"unpinned {event.name}{' (expired)' if event.expired else ''}"
    else:
        what = "up to date"
    return f"{event.revision:>10}  {what}"


def _short(digests: tuple[bytes, ...]) -> str:
    shown = " ".join(digest.hex()[:12] for digest in digests[:4])
    return shown if len(digests) <= 4 else f"{shown} ..."
