"""What a session says of itself on its stream: which version it is at, and that it is at work."""

from kvharbor.pool import validate
from kvharbor.server.served_pool import OpenedPool
from kvharbor.server.session import Session
from kvharbor.server.versions import bump, private_version
from kvharbor.v1 import blocks_pb2 as pb


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
