"""`kvharbor upgrade`: a fresh service process, of the code and the settings that are there now."""

import time
from typing import TYPE_CHECKING, Annotated

import typer

from kvharbor.server.commands.options import SocketOption, connected, seconds
from kvharbor.server.errors import CommandError

if TYPE_CHECKING:
    from kvharbor.client import Harbor, ServerInfo

_POLL_S = 0.05


def upgrade(
    wait_s: Annotated[float, typer.Option(parser=seconds(1), help="Seconds to wait for the new process.")] = 60.0,
    socket: SocketOption = None,
) -> None:
    """Replaces the service's process: calls in flight finish, sessions and what is cached go on.

    The new process is started first. If it cannot start, the old one goes on: the command says why, with exit status
    1. Changed settings that only a stop and a start change are named.
    """
    from kvharbor.client import DeadlineExceeded

    with connected(socket) as harbor:
        began_at = time.monotonic()
        try:
            before = harbor.upgrade(timeout_s=wait_s)
        except DeadlineExceeded:
            raise _too_late(wait_s) from None
        while True:
            now = _info(harbor)
            if now is not None and now.epoch != before.epoch:
                raise CommandError(f"the service has begun anew, with epoch {now.epoch}: see its log")
            if now is not None and now.restart_count > before.restart_count:
                break
            if time.monotonic() - began_at > wait_s:
                raise _too_late(wait_s)
            time.sleep(_POLL_S)
    took_s = time.monotonic() - began_at
    typer.echo(f"upgraded to {now.server_version} in {took_s:.1f} s, process {now.restart_count + 1} of its epoch")
    for kept in now.kept_settings:
        typer.echo(
            f"the setting {kept.name} stays as it was ({kept.in_force}, not {kept.wanted}): "
            f"to change it, stop the service and start it",
            err=True,
        )


def _too_late(wait_s: float) -> CommandError:
    return CommandError(f"no new process after {wait_s:g} s, the old one may go on: see the service's log")


def _info(harbor: "Harbor") -> "ServerInfo | None":
    from kvharbor.client import Unavailable

    try:
        return harbor.server_info()
    except Unavailable:
        return None
