"""Batches of extends and commits: one call, one outcome a sequence."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, Self, TypeVar

from kvharbor.client.calls import Call, PoolCalls
from kvharbor.client.commit_refusals import room_refusal
from kvharbor.client.errors import HarborError, InvalidField, SequenceInDoubt
from kvharbor.client.results import CommitResult, ExtraKey
from kvharbor.client.sequence_state import SequenceState
from kvharbor.client.tokens import TOKEN_BYTES, Tokens, token_bytes
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

    @contextlib.contextmanager
    def answered(self) -> Iterator[None]:
        """Takes in that the block, which sends the items, ends without an answer to them."""
        try:
            yield
        except BaseException as failure:  # interrupted on the way, too
            if not _is_refusal(failure):
                for sequence in self.sequences:
                    sequence.outgrown = True
            raise


class CommitBatch:
    """Commits to send together. Each takes full effect or none, whatever becomes of the others.

    Those that the tables known here have no room for are refused here. `is_empty`: no other is left to send.
    """

    def __init__(self, calls: PoolCalls, pairs: Iterable[tuple[SequenceState, cache.CommitItem]]) -> None:
        listed = [*pairs]
        _distinct([sequence for sequence, _ in listed])
        self._refusals = [room_refusal(sequence, item) for sequence, item in listed]
        self._pairs = [pair for pair, refusal in zip(listed, self._refusals, strict=True) if refusal is None]
        self.is_empty = not self._pairs
        self.call: Call[cache.CommitResponse] = calls.commit(item for _, item in self._pairs)

    @classmethod
    def of(cls, calls: PoolCalls, commits: Iterable[Commit[StateT]]) -> Self:
        """Builds the items from the sequences as they are now."""
        return cls(calls, ((commit.sequence, commit.sequence.commit_item(*commit[1:])) for commit in commits))

    def outcomes(self, reply: cache.CommitResponse) -> list[CommitResult | HarborError]:
        """Brings the sequences up to date; returns each one's result or refusal."""
        triples = zip(self._pairs, reply.results, strict=True)
        return self._with_refusals([sequence.committed(item, result) for (sequence, item), result in triples])

    def here(self) -> list[CommitResult | HarborError]:
        """Brings the sequences up to date while the service is away."""
        return self._with_refusals([sequence.committed_here(item) for sequence, item in self._pairs])

    def _with_refusals(self, outcomes: list[CommitResult | HarborError]) -> list[CommitResult | HarborError]:
        rest = iter(outcomes)
        return [next(rest) if refusal is None else refusal for refusal in self._refusals]

    def sending(self) -> None:
        """Takes in that the items are being sent: they are unanswered from here on [C5]."""
        for sequence, item in self._pairs:
            sequence.unanswered = item

    @contextlib.contextmanager
    def answered(self, *, leaving: bool = False) -> Iterator[None]:
        """Takes that back when the block, which sends the items, ends with a refusal of them all.

        `leaving`: they are hand-offs, and one that was sent and has no answer may have been one.
        """
        before = [sequence.unanswered for sequence, _ in self._pairs]
        try:
            yield
        except BaseException as failure:  # cancelled or interrupted on the way, too
            for (sequence, item), earlier in zip(self._pairs, before, strict=True):
                if _is_refusal(failure):
                    sequence.unanswered = earlier
                elif leaving and sequence.unanswered is item:
                    sequence.leave()
            raise


class Repeats:
    """Commits that ended without an answer, to be sent again before those that have to carry them [C5].

    Each commit counts from the sequence's token_count, which an unanswered one has not moved: so it names the
    unanswered one's tokens first. Raises SequenceInDoubt for one that does not.
    """

    def __init__(self, calls: PoolCalls, commits: Iterable[Commit[StateT]]) -> None:
        self._commits = [(commit, commit.sequence.token_count) for commit in (Commit(*fields) for fields in commits)]
        pairs = [(commit.sequence, earlier) for commit, _ in self._commits if (earlier := _repeated(commit))]
        self.batch = CommitBatch(calls, pairs) if pairs else None

    def rest(self) -> list[Commit[Any]]:
        """Returns the commits without what their sequences have taken in by now."""
        return [_without(commit, commit.sequence.token_count - before) for commit, before in self._commits]


def only(outcomes: Sequence[OutcomeT | HarborError]) -> OutcomeT:
    """Returns the outcome of a batch of one, or raises it if it is a refusal."""
    (outcome,) = outcomes
    if isinstance(outcome, HarborError):
        raise outcome
    return outcome


def _is_refusal(failure: BaseException) -> bool:
    """Whether what failed has had no effect."""
    return isinstance(failure, HarborError) and not failure.outcome_unknown


def _distinct(sequences: list[SequenceState]) -> list[SequenceState]:
    # Every item is built from the state before the batch: a second one of the same sequence would be wrong.
    if len({id(sequence) for sequence in sequences}) < len(sequences):
        raise InvalidField.of(
            "items", len(sequences), limit="one item a sequence", remedy="join the items of a sequence"
        )
    return sequences


def _repeated(commit: Commit[StateT]) -> cache.CommitItem | None:
    """Returns the unanswered commit that has to be repeated on its own before `commit`."""
    earlier = commit.sequence.unanswered
    if earlier is None or commit.sequence.leaving:  # a hand-off is repeated as a whole
        return None
    item = commit.sequence.commit_item(*commit[1:])
    if item == earlier:
        return None
    keys = item.extra_keys[: len(earlier.extra_keys)]
    if not item.new_token_ids.startswith(earlier.new_token_ids) or list(keys) != list(earlier.extra_keys):
        raise SequenceInDoubt(
            f"a commit of sequence {commit.sequence.id} ended without an answer, and this one does not begin with its "
            f"tokens: commit from its token_count on, or release it"
        )
    return earlier


def _without(commit: Commit[StateT], token_count: int) -> Commit[StateT]:
    if not token_count:
        return commit
    first = commit.sequence.token_count
    return commit._replace(
        new_tokens=token_bytes(commit.new_tokens)[token_count * TOKEN_BYTES :],
        extra_keys=[key for key in commit.extra_keys if key.token_offset >= first],
    )
