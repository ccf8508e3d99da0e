"""`kvharbor kill-session`: ends a session by ending its processes."""

from typing import Annotated

import typer

from kvharbor.server.commands.options import SocketOption, connected
from kvharbor.server.errors import CommandError


def kill_session(
    session: Annotated[str, typer.Argument(metavar="SESSION", help="Number of the session, from `kvharbor sessions`.")],
    socket: SocketOption = None,
) -> None:
    """Kills every process of a session with SIGKILL: for administrators, where a worker hangs.

    The processes are named by descriptors, which never mean another one, even where a pid has been given again. A
    child that a worker has forked is not one of them: end it by hand.
    """
    with connected(socket) as harbor:
        if session == harbor.session_id:
            raise CommandError(f"session {session} is this command's own: name one that `kvharbor sessions` lists")
        listed = next((each for each in harbor.list_sessions() if each.session_id == session), None)
        living_count = 0 if listed is None else sum(1 for member in listed.members if not member.exited)
        killed_count = harbor.kill_session(session)
    if killed_count < living_count:
        raise CommandError(
            f"killed {killed_count} of {living_count} processes: for the others the service has no right, see its log"
        )
    typer.echo(f"session {session}: killed {killed_count} {'process' if killed_count == 1 else 'processes'}")
