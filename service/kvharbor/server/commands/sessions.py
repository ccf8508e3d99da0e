"""`kvharbor sessions`: who is connected, and who is waited for."""

import dataclasses
import json
from typing import TYPE_CHECKING

import typer

from kvharbor.server.commands.options import JsonOption, SocketOption, connected

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from kvharbor.client import SessionInfo, SessionMember


def sessions(as_json: JsonOption = False, socket: SocketOption = None) -> None:
    """Lists the sessions of the service, those of other tenants too: for administrators.

    A session is "live"; "resuming", when the service's process was replaced and it has not come back yet; or
    "ending", when it is lost and some process of it may still touch what it held. The last state ends with that
    process: see kill-session. This command's own session is not listed.
    """
    with connected(socket) as harbor:
        found = [session for session in harbor.list_sessions() if session.session_id != harbor.session_id]
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(session) for session in found]))
        return

    from rich.console import Console

    Console().print(_table(found))


def _table(found: "list[SessionInfo]") -> "RenderableType":
    from rich.table import Table

    if not found:
        return "no sessions"
    table = Table(padding=(0, 1, 0, 0))
    # Folded, not cut short: on a narrow terminal too the pid is what is looked for.
    for name in ("id", "tenant", "client", "state", "age", "processes"):
        table.add_column(name, overflow="fold")
    for name in ("sequences", "uncommitted\nblocks"):
        table.add_column(name, justify="right", overflow="fold")
    for session in found:
        table.add_row(
            session.session_id,
            session.tenant,
            _client(session),
            f"{session.state}: {session.cause}" if session.cause else session.state,
            _age(session.age_s),
            "\n".join(_process(member) for member in session.members),
            f"{sum(each.sequence_count for each in session.holdings):,}",
            f"{sum(each.private_block_count for each in session.holdings):,}",
        )
    return table


def _client(session: "SessionInfo") -> "Text":
    """Names the client, and the engine where it has said what that is."""
    from rich.text import Text

    said = f"{session.client_name} {session.client_version.replace('/', ' ')}".strip()
    # It is the client's own word, and a terminal would act on some of what it may be.
    client = "".join(sign if sign.isprintable() else "?" for sign in said)
    is_told = session.engine.name != session.client_version.partition("/")[0]
    return Text(f"{client}\n{session.engine}" if is_told else client)


def _process(member: "SessionMember") -> str:
    """Tells where a process is, and which half of the proof that it is gone is there."""
    name = f"pid {member.pid}" if member.pid else "pid elsewhere"
    notes = [
        note
        for note, holds in (
            (f"rank {member.rank}", member.rank > 0),
            ("reads", member.read_only),
            ("exited", member.exited),
            ("socket closed", not member.connected),
        )
        if holds
    ]
    return f"{name} ({', '.join(notes)})" if notes else name


def _age(age_s: float) -> str:
    minutes, seconds = divmod(int(age_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s" if minutes else f"{seconds}s"
