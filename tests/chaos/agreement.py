"""Whether the service has what the client says that a session holds by itself: nobody should need a byte to tell."""

from kvharbor.client import BlockRun, Pool
from kvharbor.client.calls import Call
from kvharbor.client.runs import run_of, table_of
from kvharbor.v1 import cache_service_pb2 as cache


def unheld(pool: Pool) -> BlockRun:
    """Returns the blocks of the client that are not the session's, after a flush; recalls may go on meanwhile.

    Of a session that goes on, Resume changes nothing and tells just that.
    """
    link = pool.link
    with link.guard:
        life, blocks = link.standing.life, pool.own_blocks.all()
    request = cache.ResumeRequest(pool_id=pool.id, blocks=table_of(blocks))
    reply: cache.ResumeResponse = link.run(Call("Resume", request))
    with link.guard:
        if link.standing.life != life:
            return BlockRun.of(())  # the next process has told it all
        missing = run_of(reply.lost)
        missing = missing[pool.own_blocks.has(missing)]
        return missing[~missing.among(link.stream.unanswered.releases())]
