"""A sequence as a client has it, without a service, and calls on it that fail."""

from array import array

from kvharbor.client.batches import CommitBatch
from kvharbor.client.calls import PoolCalls
from kvharbor.client.sequence_state import SequenceState
from kvharbor.client.tail import Tail
from kvharbor.v1 import types_pb2

CALLS = PoolCalls("e.1")


def block_table(*blocks: tuple[int, int]) -> types_pb2.BlockTable:
    return types_pb2.BlockTable(
        block_ids=array("I", [block for block, _ in blocks]).tobytes(),
        generations=array("Q", [generation for _, generation in blocks]).tobytes(),
    )


def state(computed_tokens: int = 16, token_count: int = 40) -> SequenceState:
    """Three blocks of 16: 7, 8 and 3."""
    message = types_pb2.Sequence(
        sequence_id="e.1.2.3",
        table=block_table((7, 70), (8, 80), (3, 2**63)),
        cached_tokens=16,
        computed_tokens=computed_tokens,
        token_count=token_count,
        capacity_tokens=48,
        request_id="r",
        group="g",
    )
    tail = Tail(16, bytearray(4 * (token_count - 16)), [], types_pb2.NamespaceKey())
    return SequenceState(message, 16, tail)


def fail(batch: CommitBatch, failure: BaseException) -> None:
    """Sends a batch, which fails."""
    with batch.answered():
        batch.sending()
        raise failure
