"""Versions of weights: which one each session is at, and the end of those that no session is at any more [S37]."""

import secrets
from typing import Final

from kvharbor.server.pools.served_pool import OpenedPool, ServedPool
from kvharbor.server.sessions.session import Session

_PRIVATE: Final = "private/"
"""How a version begins that goes with its session."""


def private_version() -> str:
    """Returns a version that no other session can name."""
    return _PRIVATE + secrets.token_urlsafe(18)


async def bump(opened: OpenedPool, version: str) -> None:
    """Moves a session to a version, and frees what the one before has cached if nobody is at that any more."""
    before, opened.version = opened.version, version
    if before != version:
        await _retire(opened.served, before)


async def retire_private(session: Session, opened: OpenedPool) -> None:
    """Frees what the private version of a session has cached that has just left the pool."""
    if opened.version.startswith(_PRIVATE) and session not in opened.served.sessions:
        await _retire(opened.served, opened.version)


async def retire_left(served: ServedPool) -> None:
    """Frees, once after a restart, what private versions have cached that nobody is at.

    That is known when all sessions have said where they are: one that had still to may have ended instead.
    """
    if not served.may_have_left_versions or any(_has_to_say(each, served.pool_id) for each in served.sessions):
        return
    served.may_have_left_versions = False
    for version in served.pool.versions(served.tenant):
        if version.startswith(_PRIVATE):
            await _retire(served, version)


async def _retire(served: ServedPool, version: str) -> None:
    if not any(_may_be_at(session, served.pool_id, version) for session in served.sessions):
        await served.owner.run_unbound(lambda: served.pool.retire_version(served.tenant, version))


def _may_be_at(session: Session, pool_id: str, version: str) -> bool:
    opened = session.opened.get(pool_id)
    return not session.ended and opened is not None and (opened.version == version or _has_to_say(session, pool_id))


def _has_to_say(session: Session, pool_id: str) -> bool:
    """Whether a session of an earlier process has still to tell which version it is at, with its Resume."""
    opened = session.opened.get(pool_id)
    return not session.ended and opened is not None and not opened.resumed
