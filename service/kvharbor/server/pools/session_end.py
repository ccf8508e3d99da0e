"""How a session leaves a pool: in two steps, as its processes are proved gone [S24]."""

import structlog

from kvharbor.server.pools.served_pool import OpenedPool
from kvharbor.server.pools.versions import retire_left, retire_private
from kvharbor.server.session_errors import SessionUnknown
from kvharbor.server.sessions.quiet import until_gone
from kvharbor.server.sessions.session import Session

log = structlog.get_logger(__name__)


async def end_in_pool(session: Session, opened: OpenedPool) -> int:
    """Takes an ended session out of a pool; returns the sequences released.

    Its calls under way end first. What it had not committed waits in quarantine until no process of it can write;
    what it read stays held until none can read. A session that has nothing waits for nothing, but one that has not
    resumed may read anything that the recovery holds.
    """
    served, number = opened.served, session.number
    pool, owner, grace_s = served.pool, served.owner, served.grace_s
    served.admission.give_up(session, SessionUnknown(session.cause))
    await owner.run(opened.turns, lambda: pool.end_session(number))
    held = pool.holding(number)
    if held.private_block_count:
        log.info("blocks quarantined", session=number, pool=served.pool_id, block_count=held.private_block_count)
        await until_gone(session.writers, grace_s)
        await owner.run(opened.turns, lambda: pool.writers_quiet(number))
    if held.sequence_count or held.held_block_count or not opened.resumed:
        await until_gone(session.members, grace_s)
    released_count = await owner.run(opened.turns, lambda: pool.session_quiet(number))
    served.sessions.discard(session)
    served.recorder.session_ended(number)
    await retire_private(session, opened)
    await retire_left(served)
    return released_count
