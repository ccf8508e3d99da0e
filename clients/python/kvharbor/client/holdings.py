"""What a session holds in its pools, as another process of the service has to be told [C11]."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kvharbor.client.calls import Call, PoolCalls
from kvharbor.client.errors import EpochEnded, HarborError, PoolNotFound
from kvharbor.client.memory import PoolMemory
from kvharbor.client.releases import LiveSequences
from kvharbor.client.sequence_state import SequenceState
from kvharbor.v1 import cache_service_pb2 as cache

BATCH_BYTES = 8 * 2**20
"""Of one Resume: well below what a message may have, as one sequence alone can be of some MiB."""


class HeldPool(Protocol):
    """A pool of either client."""

    id: str
    name: str
    memory: PoolMemory
    sequences: LiveSequences
    asked_bytes: int

    def moved(self, pool_id: str) -> None:
        """Takes another id."""


@dataclass(frozen=True, slots=True)
class Telling:
    """One Resume, and the sequences that it names, in order."""

    request: cache.ResumeRequest
    sequences: list[SequenceState]

    def told(self, reply: cache.ResumeResponse) -> None:
        """Brings the sequences up to date."""
        for sequence, result in zip(self.sequences, reply.results, strict=True):
            sequence.resumed(result)

    def refused(self, cause: HarborError) -> None:
        """The pool is not there any more."""
        for sequence in self.sequences:
            sequence.lose(cause)


def releases(pools: Mapping[str, HeldPool]) -> list[Call[cache.ReleaseResponse]]:
    """Returns what ends those that were released while the service was away, after they have been told of."""
    return [
        PoolCalls(pool.id).release(cache.ReleaseItem(sequence_id=sequence.id) for sequence in pool.sequences.owed)
        for pool in pools.values()
        if pool.sequences.owed
    ]


def settle(pools: Mapping[str, HeldPool]) -> None:
    """Takes in that everything has been told."""
    for pool in pools.values():
        pool.sequences.owed.clear()


def tellings(pools: Mapping[str, HeldPool], opened_pool_ids: Iterable[str]) -> list[Telling]:
    """Returns what to tell about each pool that the service knows this session to have open.

    Sequences in other pools are lost.
    """
    known = set(opened_pool_ids)
    for pool in pools.values():
        if pool.id not in known:
            gone = PoolNotFound(f"pool {pool.name} is not open any more", metadata={"poolId": pool.id})
            Telling(cache.ResumeRequest(), pool.sequences.live()).refused(gone)
    return [
        telling
        for pool_id in known
        for telling in _batches(pool_id, pools[pool_id].sequences if pool_id in pools else LiveSequences())
    ]


def void(pools: Mapping[str, HeldPool], epoch: str) -> None:
    """Ends every sequence, as the epoch that it belongs to has ended."""
    for pool in pools.values():
        for sequence in pool.sequences.live():
            message = f"sequence {sequence.id} is of epoch {epoch}, which has ended with all of its KV: start over"
            sequence.end_with(EpochEnded(message, metadata={"sequenceId": sequence.id, "epoch": epoch}))
        pool.sequences.owed.clear()


def rekeyed(pools: dict[str, Any], moves: Mapping[str, str]) -> None:
    """Gives pools their new ids, old -> new."""
    moved = [(pools.pop(old_id), new_id) for old_id, new_id in moves.items()]
    for pool, new_id in moved:
        pool.moved(new_id)
        pools[new_id] = pool


def _batches(pool_id: str, sequences: LiveSequences) -> Iterator[Telling]:
    # Two objects may stand for one sequence, where an allocate was repeated by its request_id.
    distinct = {sequence.id: sequence for sequence in (*sequences.live(), *sequences.owed)}
    telling = Telling(cache.ResumeRequest(pool_id=pool_id), [])
    size_bytes = 0
    for sequence in distinct.values():
        held = sequence.held()
        size_bytes += held.ByteSize()
        if telling.sequences and size_bytes > BATCH_BYTES:
            yield telling
            telling = Telling(cache.ResumeRequest(pool_id=pool_id), [])
            size_bytes = held.ByteSize()
        telling.request.sequences.append(held)
        telling.sequences.append(sequence)
    telling.request.complete = True
    yield telling
