"""What a session says of itself on its stream: its version, that it is at work, and what it computes no more."""

from kvharbor.pool import validate
from kvharbor.pool.steps import Steps
from kvharbor.server.calls.batches import each
from kvharbor.server.messages.blocks import chain_of
from kvharbor.server.pools.served_pool import OpenedPool
from kvharbor.server.pools.versions import bump, private_version
from kvharbor.server.sessions.session import Session
from kvharbor.v1 import blocks_pb2 as pb
from kvharbor.v1 import types_pb2


async def bump_namespace(
    session: Session,  # noqa: ARG001 - as all of them
    opened: OpenedPool,
    request: pb.BumpNamespaceRequest,
) -> pb.BumpNamespaceResponse:
    """Moves the session to another version."""
    validate.text("version", request.version)
    version = request.version or private_version()
    await bump(opened, version)
    return pb.BumpNamespaceResponse(version=version)


async def computing(
    session: Session,
    opened: OpenedPool,
    request: pb.ComputingRequest,  # noqa: ARG001 - as all of them
) -> pb.ComputingResponse:
    """Hears that the session is at work on what it computes."""
    owner = opened.served.owner
    owner.call(lambda: owner.pool.note_computing(session.number))
    return pb.ComputingResponse()


async def abandon(session: Session, opened: OpenedPool, request: pb.AbandonRequest) -> pb.AbandonResponse:
    """Hears what the session does not compute any more, chain by chain."""
    pool, number = opened.served.pool, session.number

    def one(item: pb.BlockChain) -> Steps[types_pb2.ItemStatus]:
        yield from pool.abandon(number, chain_of(item, opened.version))
        return types_pb2.ItemStatus()

    statuses = await opened.served.owner.run(
        opened.turns, lambda: each(opened, "chains", request.chains, one, lambda status: status)
    )
    return pb.AbandonResponse(statuses=statuses)
