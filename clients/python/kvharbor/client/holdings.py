"""What a session holds in its pools, as another process of the service has to be told [C11]."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kvharbor.client.calls import Call, PoolCalls
from kvharbor.client.errors import EpochEnded, HarborError, PoolNotFound
from kvharbor.client.memory import PoolMemory
from kvharbor.client.releases import LiveSequences
from kvharbor.client.runs import BlockRun, OwnBlocks, run_of, table_of
from kvharbor.client.sequence_state import SequenceState
from kvharbor.v1 import cache_service_pb2 as cache

BATCH_BYTES = 8 * 2**20
"""Of one Resume: well below what a message may have, as one sequence alone can be of some MiB."""
BATCH_ITEMS = 4096
"""Of one Resume or Release: the service takes 8,192."""
BATCH_BLOCKS = 2**19
"""Of one Resume, of twelve bytes each."""


class Decoding(Protocol):
    """Sequences whose state is ahead of what their objects have."""

    def bring_up_to_date(self) -> None:
        """Has each sequence's object tell all that it has."""


class HeldPool(Protocol):
    """A pool of either client."""

    id: str
    name: str
    memory: PoolMemory
    sequences: LiveSequences
    asked_bytes: int
    calls: PoolCalls

    @property
    def own_blocks(self) -> OwnBlocks:
        """What the session holds by itself."""

    @property
    def batches(self) -> Iterable[Decoding]:
        """What is ahead of its sequences' objects."""

    def blocks_lost(self, lost: BlockRun, cause: HarborError | None) -> None:
        """Takes in that the session does not hold these blocks any more; None: as the service's ledger has it."""

    def moved(self, pool_id: str) -> None:
        """Takes another id."""


@dataclass(frozen=True, slots=True)
class Telling:
    """One Resume of a pool, and the sequences that it names, in order. No pool: none that is open here."""

    pool: HeldPool | None
    request: cache.ResumeRequest
    sequences: list[SequenceState]

    def told(self, reply: cache.ResumeResponse) -> None:
        """Brings the sequences and the blocks up to date."""
        for sequence, result in zip(self.sequences, reply.results, strict=True):
            sequence.resumed(result)
        if self.pool is not None and reply.lost.block_ids:
            self.pool.blocks_lost(run_of(reply.lost), None)

    def refused(self, cause: HarborError) -> None:
        """The pool is not there any more."""
        for sequence in self.sequences:
            sequence.lose(cause)
        if self.pool is not None:
            self.pool.blocks_lost(self.pool.own_blocks.all(), cause)


def releases(pools: Mapping[str, HeldPool]) -> list[Call[cache.ReleaseResponse]]:
    """Returns what ends those that were released while the service was away, after they have been told of."""
    calls = []
    for pool in pools.values():
        owed = pool.sequences.owed
        for first in range(0, len(owed), BATCH_ITEMS):
            part = owed[first : first + BATCH_ITEMS]
            calls.append(PoolCalls(pool.id).release(cache.ReleaseItem(sequence_id=sequence.id) for sequence in part))
    return calls


def settle(pools: Mapping[str, HeldPool]) -> None:
    """Takes in that everything has been told."""
    for pool in pools.values():
        pool.sequences.owed.clear()


def tellings(pools: Mapping[str, HeldPool], opened_pool_ids: Iterable[str]) -> list[Telling]:
    """Returns what to tell about each pool that the service knows this session to have open.

    Sequences and blocks in other pools are lost.
    """
    known = set(opened_pool_ids)
    for pool in pools.values():
        if pool.id not in known:
            gone = PoolNotFound(f"pool {pool.name} is not open any more", metadata={"poolId": pool.id})
            Telling(pool, cache.ResumeRequest(), pool.sequences.live()).refused(gone)
    return [telling for pool_id in known for telling in _tellings(pool_id, pools.get(pool_id))]


def void(pools: Mapping[str, HeldPool], epoch: str) -> EpochEnded:
    """Ends every sequence, as the epoch that it belongs to has ended; returns the error of all else that has."""
    for pool in pools.values():
        for sequence in pool.sequences.live():
            message = f"sequence {sequence.id} is of epoch {epoch}, which has ended with all of its KV: start over"
            sequence.end_with(EpochEnded(message, metadata={"sequenceId": sequence.id, "epoch": epoch}))
        pool.sequences.owed.clear()
    ended = EpochEnded(f"epoch {epoch} has ended with all of its KV: start over", metadata={"epoch": epoch})
    for pool in pools.values():
        pool.blocks_lost(pool.own_blocks.all(), ended)
    return ended


def rekeyed(pools: dict[str, Any], moves: Mapping[str, str]) -> None:
    """Gives pools their new ids, old -> new."""
    moved = [(pools.pop(old_id), new_id) for old_id, new_id in moves.items()]
    for pool, new_id in moved:
        pool.moved(new_id)
        pools[new_id] = pool


def _tellings(pool_id: str, pool: HeldPool | None) -> list[Telling]:
    tellings = [Telling(pool, cache.ResumeRequest(pool_id=pool_id), [])]
    if pool is not None:
        for batch in pool.batches:
            batch.bring_up_to_date()
        _name_sequences(tellings, pool)
        _name_blocks(tellings, pool)
        if pool.calls.version:
            # After the sequences: an empty version of theirs is that of then.
            _room(tellings, fits=not tellings[-1].sequences).request.version = pool.calls.version
    tellings[-1].request.complete = True
    return tellings


def _name_sequences(tellings: list[Telling], pool: HeldPool) -> None:
    size_bytes = 0
    for sequence in (*pool.sequences.live(), *pool.sequences.owed):
        held = sequence.held()
        size_bytes += held.ByteSize()
        named_count = len(tellings[-1].sequences)
        fits = not named_count or (named_count < BATCH_ITEMS and size_bytes <= BATCH_BYTES)
        telling = _room(tellings, fits=fits)
        size_bytes = size_bytes if fits else held.ByteSize()
        telling.request.sequences.append(held)
        telling.sequences.append(sequence)


def _name_blocks(tellings: list[Telling], pool: HeldPool) -> None:
    blocks = pool.own_blocks.all()
    for first in range(0, len(blocks), BATCH_BLOCKS):
        telling = _room(tellings, fits=not first)
        telling.request.blocks.CopyFrom(table_of(blocks[first : first + BATCH_BLOCKS]))


def _room(tellings: list[Telling], *, fits: bool) -> Telling:
    """Returns the last one, or another one behind it."""
    if not fits:
        last = tellings[-1]
        tellings.append(Telling(last.pool, cache.ResumeRequest(pool_id=last.request.pool_id), []))
    return tellings[-1]
