"""Sessions as the keeper has them: facts that JSON holds, and the descriptors that prove their processes."""

import socket
from typing import Any

from kvharbor.pool import Engine
from kvharbor.server.sessions.members import Member, Mode
from kvharbor.server.sessions.peer import Peer
from kvharbor.server.sessions.session import Session, State
from kvharbor.server.supervision.keeper import Keeper


def keep_session(keeper: Keeper, session: Session) -> None:
    """Keeps a session as it stands, without its members."""
    meta: dict[str, Any] = {
        "token": session.token,
        "join_token": session.join_token,
        "client_name": session.client_name,
        "client_version": session.client_version,
        "engine": [session.engine.name, session.engine.version, session.engine.instance],
        "began_at": session.began_at,
        "pool_ids": [*session.opened],
        "cause": session.cause,
        "closed": session.closed,
    }
    keeper.keep(f"session/{session.number}", meta)


def keep_member(keeper: Keeper, session: Session, member: Member) -> None:
    """Keeps a member with its pidfd and its open sockets."""
    peer = member.peer
    meta: dict[str, Any] = {
        "mode": member.mode.value,
        "token": member.token,
        "pid": peer.pid,
        "uid": peer.uid,
        "tenant": peer.tenant,
        "administrator": peer.administrator,
    }
    keeper.keep(f"member/{session.number}/{member.rank}", meta, member.fds())


def drop_session(keeper: Keeper, session: Session) -> None:
    """Keeps it no longer, nor its members."""
    keeper.drop(f"session/{session.number}")
    for member in session.members:
        keeper.drop(f"member/{session.number}/{member.rank}")


def restored_sessions(keeper: Keeper) -> list[Session]:
    """Returns the sessions that an earlier process has kept, each to resume, and takes over their descriptors.

    Members without their session were being made or dropped when that process ended: nobody knows of them.
    """
    names = [name.split("/") for name in keeper.kept]
    ranks: dict[int, list[int]] = {int(number): [] for kind, *rest in names if kind == "session" for number in rest}
    for _, number, rank in (name for name in names if name[0] == "member"):
        if int(number) in ranks:
            ranks[int(number)].append(int(rank))
        else:
            keeper.drop(f"member/{number}/{rank}")
    return [_session(keeper, number, sorted(its)) for number, its in sorted(ranks.items())]


def _session(keeper: Keeper, number: int, ranks: list[int]) -> Session:
    meta = keeper.kept[f"session/{number}"].meta
    members = [_member(keeper, f"member/{number}/{rank}", rank) for rank in ranks]
    return Session(
        number=number,
        token=meta["token"],
        peer=members[0].peer,
        client_name=meta["client_name"],
        client_version=meta["client_version"],
        # A process of a version without engines has kept none.
        engine=Engine(*meta.get("engine", ())),
        join_token=meta["join_token"],
        state=State.RESUMING,
        began_at=meta["began_at"],
        members=members,
        kept_pool_ids=frozenset(meta["pool_ids"]),
        cause=meta["cause"],
        closed=meta["closed"],
    )


def _member(keeper: Keeper, name: str, rank: int) -> Member:
    meta = keeper.kept[name].meta
    pidfd, *sockets = keeper.hand_over(name)
    connections = [socket.socket(fileno=fd) for fd in sockets]
    for connection in connections:
        connection.setblocking(False)
    peer = Peer(meta["pid"], meta["uid"], meta["tenant"], meta["administrator"])
    return Member(rank, Mode(meta["mode"]), peer, meta["token"], pidfd, connections, is_awaited=True)
