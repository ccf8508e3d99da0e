"""Batches of extends and commits: one call, one outcome a sequence."""

from collections.abc import Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

from kvharbor.client.calls import Call, PoolCalls
from kvharbor.client.errors import HarborError, InvalidField
from kvharbor.client.results import CommitResult, ExtraKey
from kvharbor.client.sequence_state import SequenceState
from kvharbor.client.tokens import Tokens
from kvharbor.v1 import cache_service_pb2 as cache

StateT = TypeVar("StateT", bound=SequenceState)
OutcomeT = TypeVar("OutcomeT")


class Commit(NamedTuple, Generic[StateT]):
    """One commit of a batch: KV of the first computed_tokens is written; new_tokens came since the last commit.

    Extra keys are those of the new tokens, their offsets counted from the start of the sequence.
    """

    sequence: StateT
    computed_tokens: int
    new_tokens: Tokens = ()
    extra_keys: Sequence[ExtraKey] = ()


class ExtendBatch:
    """Extends to send together. Each takes full effect or none, whatever becomes of the others."""

    def __init__(self, calls: PoolCalls, extends: Iterable[tuple[SequenceState, int]]) -> None:
        pairs = [(sequence, sequence.extend_item(token_count)) for sequence, token_count in extends]
        self.sequences = _distinct([sequence for sequence, _ in pairs])
        self.call: Call[cache.ExtendResponse] = calls.extend(item for _, item in pairs)

    def outcomes(self, reply: cache.ExtendResponse) -> list[HarborError | None]:
        """Brings the sequences up to date; returns what was refused, None where nothing was."""
        pairs = zip(self.sequences, reply.results, strict=True)
        return [sequence.extended(result) for sequence, result in pairs]


class CommitBatch:
    """Commits to send together. Each takes full effect or none, whatever becomes of the others."""

    def __init__(self, calls: PoolCalls, commits: Iterable[Commit[StateT]]) -> None:
        pairs = [
            (commit.sequence, commit.sequence.commit_item(*commit[1:]))
            for commit in (Commit(*fields) for fields in commits)
        ]
        self.sequences = _distinct([sequence for sequence, _ in pairs])
        self._items = [item for _, item in pairs]
        self.call: Call[cache.CommitResponse] = calls.commit(self._items)

    def outcomes(self, reply: cache.CommitResponse) -> list[CommitResult | HarborError]:
        """Brings the sequences up to date; returns each one's result or refusal."""
        triples = zip(self.sequences, self._items, reply.results, strict=True)
        return [sequence.committed(item, result) for sequence, item, result in triples]


def only(outcomes: Sequence[OutcomeT | HarborError]) -> OutcomeT:
    """Returns the outcome of a batch of one, or raises it if it is a refusal."""
    (outcome,) = outcomes
    if isinstance(outcome, HarborError):
        raise outcome
    return outcome


def _distinct(sequences: list[SequenceState]) -> list[SequenceState]:
    # Every item is built from the state before the batch: a second one of the same sequence would be wrong.
    if len({id(sequence) for sequence in sequences}) < len(sequences):
        raise InvalidField.of(
            "items", len(sequences), limit="one item a sequence", remedy="join the items of a sequence"
        )
    return sequences
