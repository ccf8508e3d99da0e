"""`kvharbor watch`: the index of a pool and its changes, a line each."""

import json
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from kvharbor.server.commands.options import JsonOption, PoolArgument, SocketOption, TenantOption, connected
from kvharbor.server.errors import CommandError

if TYPE_CHECKING:
    from kvharbor.client import Harbor, ServerInfo, WatchEvent

_POLL_S = 0.1
_PATIENCE_S = 10.0
"""Over TCP, where nothing tells that a service does not come back."""


def watch(
    pool: PoolArgument,
    start_revision: Annotated[
        int, typer.Option("--from", min=0, help="Resume after this revision. 0: the whole index first.")
    ] = 0,
    as_json: JsonOption = False,
    tenant: TenantOption = None,
    socket: SocketOption = None,
) -> None:
    """Follows what is published, evicted and unpinned, until interrupted.

    When the service's process has been replaced, a line says so, with "restart_count" in JSON, and the whole index
    follows again. When the service is shut down or begins anew, or the pool is dropped, it ends with exit status 1.
    """
    from kvharbor.client import Unavailable

    with connected(socket) as harbor, suppress(KeyboardInterrupt):
        followed, before = harbor.find_pool(pool, tenant), harbor.server_info()
        while True:
            events = followed.watch(start_revision)
            try:
                with events:
                    for event in events:
                        typer.echo(json.dumps(_facts(event)) if as_json else _line(event))
            except Unavailable:
                start_revision = events.revision
            now = _present(harbor)
            if now.epoch != before.epoch:
                raise CommandError(f"the service has begun anew, with epoch {now.epoch}: its pools are empty")
            if now.restart_count != before.restart_count:
                before, start_revision = now, 0
                typer.echo(_replaced(now, as_json=as_json))


def _present(harbor: "Harbor") -> "ServerInfo":
    """Waits for the service's next process, if the present one has ended; raises what tells that there is none."""
    from kvharbor.client import Unavailable

    until_s = time.monotonic() + _PATIENCE_S
    while True:
        time.sleep(_POLL_S)
        try:
            return harbor.server_info()
        except Unavailable:
            if not harbor.session_id and time.monotonic() > until_s:
                raise


def _replaced(now: "ServerInfo", *, as_json: bool) -> str:
    if as_json:
        return json.dumps({"restart_count": now.restart_count})
    return "the service's process was replaced: the whole index again"


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
