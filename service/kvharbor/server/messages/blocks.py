"""Messages of block calls as values of `kvharbor.pool`, and back. Nothing is decided here."""

from kvharbor.pool import Acquired, BlockRun, Chain, Shadow
from kvharbor.pool.hints import NO_HINTS
from kvharbor.pool.steps import Steps
from kvharbor.server.messages.wire import extra_keys_of, hints_of, pending_message, put_shadows, table_message
from kvharbor.v1 import blocks_pb2 as pb
from kvharbor.v1 import types_pb2


def chain_of(message: pb.BlockChain | pb.CommitChain, version: str) -> Chain:
    """Returns the contents that the message names; `version` is its session's."""
    namespace = message.namespace
    hints = NO_HINTS
    if isinstance(message, pb.CommitChain) and message.HasField("hints"):
        hints = hints_of(message.hints)
    return Chain(
        token_ids=message.token_ids,
        keys=message.keys,
        extra_keys=extra_keys_of(message.extra_keys),
        version=namespace.version or version,
        adapter=namespace.adapter,
        salt=namespace.salt,
        scheme=namespace.scheme,
        hints=hints,
    )


def acquired_message(acquired: Acquired) -> pb.AcquireResult:
    """Returns what an Acquire has come to for one chain."""
    return pb.AcquireResult(
        status=types_pb2.ItemStatus(),
        held=table_message(acquired.held),
        leased=table_message(acquired.leased),
        pending=pending_message(acquired.pending),
        stands_back=acquired.stands_back,
    )


def leased_message(leased: BlockRun) -> pb.AcquireResult:
    """Returns what a Lease that has waited has come to."""
    return pb.AcquireResult(status=types_pb2.ItemStatus(), leased=table_message(leased))


def committed_message(shadows: tuple[Shadow, ...]) -> Steps[pb.CommitChainResult]:
    """Makes what a commit of one chain has come to."""
    result = pb.CommitChainResult(status=types_pb2.ItemStatus())
    yield from put_shadows(result.shadows, shadows)
    return result
