"""What a client knows of its sequence: table, cursors, shadows. No I/O; sync and asyncio sequences are this.

cached_tokens <= computed_tokens <= token_count <= capacity_tokens.
"""

import contextlib
import copy
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvharbor.client import commit_refusals, refusals
from kvharbor.client.calls import key_messages, request, whole
from kvharbor.client.errors import (
    HarborError,
    InvalidField,
    SequenceBusy,
    SequenceEnded,
    SequenceInDoubt,
    SequenceLost,
)
from kvharbor.client.pending import Pending
from kvharbor.client.results import CommitResult, ExtraKey, Shadow
from kvharbor.client.tail import Tail
from kvharbor.client.tokens import TOKEN_BYTES, Tokens, token_bytes
from kvharbor.client.traffic import Miss
from kvharbor.v1 import cache_service_pb2 as cache
from kvharbor.v1 import types_pb2

MAX_SWITCHED = 65_536
"""So many the service takes with one commit; the others are reported with the next."""


class Batch(Protocol):
    """What has taken a sequence over, as it were: whose state is ahead of the sequence's own."""

    def note_end(self, sequence: Any) -> None:
        """Takes in that a sequence of it has ended."""

    def release(self, sequences: Any) -> None:
        """Ends sequences of it."""


class SequenceState:
    """One request's block table and cursors, as of the last reply.

    `table` holds block ids (int32), entry i for tokens [i * block_tokens, (i + 1) * block_tokens), and
    `generations` (uint64) their generations. Both are replaced, never changed in place: a table handed out
    stays what it was. KV may be written at positions [cached_tokens, capacity_tokens).

    `miss` tells why its allocate has not reused more; None if all that could be was, or it began otherwise. `pending`
    tells what another session was computing of the prompt then; None: nothing.

    `unanswered` is a commit that was sent and has no answer: the next one has to carry it [C5], and another process of
    the service is told of it as if it had taken effect [C11]. `untold`: the service is away and has still to learn of a
    commit. `outgrown`: an extend ended without an answer, and the service's table may be longer than this one [C5].
    `batch`: a DecodeBatch appends to it, and is ahead of what is here [C20].
    """

    ended = True
    """Whether it was released, handed off or lost; also while it is being made, for `__del__`."""

    def __init__(self, message: types_pb2.Sequence, block_tokens: int, tail: Tail) -> None:
        self.id = message.sequence_id
        self.request_id = message.request_id
        self.group = message.group
        self.block_tokens = block_tokens
        self.table, self.generations = _arrays(message.table)
        self.cached_tokens = message.cached_tokens
        self.computed_tokens = message.computed_tokens
        self.token_count = message.token_count
        self.capacity_tokens = message.capacity_tokens
        self.tail = tail
        self.miss: Miss | None = None
        self.pending: Pending | None = None
        self.ended = False
        self.unanswered: cache.CommitItem | None = None
        self.untold = False
        self.outgrown = False
        self.leaving = False
        self.batch: Batch | None = None
        self._ended_by: HarborError | None = None
        self._shadows: dict[int, Shadow] = {}
        self._switched: list[int] = []

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.id} cached={self.cached_tokens} computed={self.computed_tokens} "
            f"tokens={self.token_count} capacity={self.capacity_tokens}{' ended' if self.ended else ''}>"
        )

    @property
    def shadows(self) -> tuple[Shadow, ...]:
        """Own blocks that another block has the content of, and that are still in the table."""
        return tuple(self._shadows.values())

    def slots(self, first_token: int, end_token: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Returns where tokens [first_token, end_token) are, as an index: `views.numpy("k", layer)[slots]`.

        Reading through it copies; assigning to it writes in place. Raises InvalidField outside the capacity,
        and what `require_held` does when the blocks may be others' already.
        """
        self.require_held()
        first_token, end_token = whole("first_token", first_token), whole("end_token", end_token)
        if not 0 <= first_token <= end_token <= self.capacity_tokens:
            raise InvalidField.of(
                "tokens",
                f"[{first_token}, {end_token})",
                limit=f"within [0, {self.capacity_tokens})",
                remedy="extend the sequence first",
            )
        entries, offsets = np.divmod(np.arange(first_token, end_token), self.block_tokens)
        return self.table[entries], offsets

    def switch_shadows(self) -> tuple[int, ...]:
        """Replaces the table's shadows by the canonical blocks of the same content; returns their positions.

        The shadows must not be touched any more, device work in flight included. The service takes them back
        with the next commit, which reports the positions.
        """
        self._require_alone()
        with self._unchanging():
            if not self._shadows:
                return ()
            positions = tuple(self._shadows)
            table, generations = self.table.copy(), self.generations.copy()
            for shadow in self._shadows.values():
                table[shadow.position] = shadow.block_id
                generations[shadow.position] = shadow.generation
            self.table, self.generations = table, generations
            self._shadows.clear()
            self._switched.extend(positions)
            return positions

    @property
    def has_switched(self) -> bool:
        """Whether the next commit has to report switched shadows."""
        return bool(self._switched)

    def shorten(self, block_count: int) -> None:
        """Takes the last blocks out of the table, which have never become part of the sequence."""
        self.table, self.generations = self.table[:-block_count], self.generations[:-block_count]
        self.capacity_tokens -= block_count * self.block_tokens

    def require_held(self) -> None:
        """Raises what keeps this process from touching the blocks.

        SequenceEnded after release or hand-off, SequenceInDoubt after a hand-off without an answer [C5], and what else
        the sequence has ended by, such as SequenceLost or EpochEnded.
        """
        self.require_not_ended()
        self._require_not_leaving()

    def require_not_ended(self) -> None:
        """Raises SequenceEnded after release or hand-off, and what else the sequence has ended by."""
        if self._ended_by is not None:
            raise copy.copy(self._ended_by)
        if self.ended:
            raise SequenceEnded(f"sequence {self.id} was released or handed off: allocate a new one")

    def require_usable(self) -> None:
        """Raises what `require_held` does, and SequenceInDoubt after a commit without an answer [C5]."""
        self.require_held()
        if self.unanswered is not None:
            raise SequenceInDoubt(
                f"a commit of sequence {self.id} ended without an answer: commit again, with its tokens, or release"
            )
        self._require_alone()

    def _require_alone(self) -> None:
        if self.batch is not None:
            raise SequenceBusy(f"sequence {self.id} is in a DecodeBatch: leave that first, or use the batch")

    def _require_not_leaving(self) -> None:
        if self.leaving:
            raise SequenceInDoubt(
                f"the hand-off of sequence {self.id} ended without an answer: hand it off again, or release it"
            )

    def extend_item(self, token_count: int) -> cache.ExtendItem:
        """Asks for capacity for so many more tokens than it has; may be repeated, as it names the blocks known."""
        self.require_held()
        self._require_alone()
        if whole("token_count", token_count) < 0:
            raise InvalidField.of("token_count", token_count, limit="at least 0", remedy="capacity never shrinks")
        return request(
            cache.ExtendItem,
            sequence_id=self.id,
            capacity_tokens=self.capacity_tokens + token_count,
            known_block_count=len(self.table),
        )

    def commit_item(
        self, computed_tokens: int, new_tokens: Tokens, extra_keys: Sequence[ExtraKey] = (), *, leaving: bool = False
    ) -> cache.CommitItem:
        """Names what is written, with the blocks that hold it by the table, so that a wrong table is noticed."""
        self.require_not_ended()
        self._require_alone()
        if not leaving:
            self._require_not_leaving()
        item = request(
            cache.CommitItem,
            sequence_id=self.id,
            computed_tokens=computed_tokens,
            new_token_ids=token_bytes(new_tokens, "new_tokens"),
            switched_positions=self._switched[:MAX_SWITCHED],
            known_token_count=self.token_count,
        )
        if extra_keys:
            item.extra_keys.extend(key_messages(extra_keys))
        if item.computed_tokens > self.computed_tokens:
            first, end = self.computed_tokens // self.block_tokens, -(-item.computed_tokens // self.block_tokens)
            item.written.block_ids = self.table[first:end].astype("<u4").tobytes()
            item.written.generations = self.generations[first:end].astype("<u8").tobytes()
        return item

    def held(self) -> cache.HeldSequence:
        """Tells another process of the service all about it [C11]; what was switched is in the table already."""
        self._switched.clear()
        held = self._held()
        if self.unanswered is not None and commit_refusals.refusal(self, self.unanswered) is None:
            # It may have taken effect, and the service takes up no sequence that has less than the ledger [L12].
            held.sequence.computed_tokens = self.unanswered.computed_tokens
            held.sequence.token_count = self.token_count_with(self.unanswered)
            held.tail_token_ids += self.unanswered.new_token_ids
            held.extra_keys.extend(self.unanswered.extra_keys)
        return held

    def _held(self) -> cache.HeldSequence:
        return cache.HeldSequence(
            sequence=types_pb2.Sequence(
                sequence_id=self.id,
                table=types_pb2.BlockTable(
                    block_ids=self.table.astype("<u4").tobytes(), generations=self.generations.astype("<u8").tobytes()
                ),
                cached_tokens=self.cached_tokens,
                computed_tokens=self.computed_tokens,
                token_count=self.token_count,
                capacity_tokens=self.capacity_tokens,
                request_id=self.request_id,
                group=self.group,
            ),
            namespace=self.tail.namespace,
            committed_tokens=self.tail.committed_tokens,
            tail_token_ids=bytes(self.tail.token_ids),
            extra_keys=self.tail.extra_keys,
            pin_name=self.tail.pin_name,
        )

    def extended(self, result: cache.ExtendResult) -> HarborError | None:
        """Takes in the result of an extend_item; returns its refusal, if it is one."""
        if self._ended_by is not None:
            return copy.copy(self._ended_by)
        if result.status.code:
            return refusals.from_item(result.status)
        if result.added.block_ids:
            table, generations = _arrays(result.added)
            self.table = np.concatenate([self.table, table])
            self.generations = np.concatenate([self.generations, generations])
        self.capacity_tokens = result.capacity_tokens
        self.outgrown = False
        return None

    def committed(self, item: cache.CommitItem, result: cache.CommitResult) -> CommitResult | HarborError:
        """Takes in the result of `item`; returns its refusal, if it is one."""
        self.unanswered = None
        if self._ended_by is not None:
            return copy.copy(self._ended_by)
        if result.status.code:
            return refusals.from_item(result.status)
        self._advance(item)
        reported = set(item.switched_positions)
        self._switched = [position for position in self._switched if position not in reported]
        self.tail.publish(result.committed_tokens)
        shadows = tuple(Shadow(shadow.position, shadow.block_id, shadow.generation) for shadow in result.shadows)
        # A repeated commit tells of all, also of what was switched since it was sent first.
        switched = set(self._switched)
        self._shadows.update((shadow.position, shadow) for shadow in shadows if shadow.position not in switched)
        return CommitResult(result.committed_tokens, shadows)

    def committed_here(self, item: cache.CommitItem) -> CommitResult | HarborError:
        """Takes in `item` while the service is away, for `held` to tell; returns what would be its refusal."""
        self.unanswered = None
        if self._ended_by is not None:
            return copy.copy(self._ended_by)
        if (refusal := commit_refusals.refusal(self, item)) is not None:
            return refusal
        self._advance(item)
        self.untold = True
        return CommitResult(self.tail.committed_tokens, pending=True)

    def resumed(self, result: cache.ResumeResult) -> None:
        """Takes in what another process of the service answers to `held`."""
        if self.ended:
            return
        if result.status.code:
            self.end_with(self._lost(refusals.from_item(result.status)))
            return
        self.untold = self.outgrown = False
        if self.unanswered is None:  # else its answer says what of it is published
            self.tail.publish(result.committed_tokens)
        switched = set(self._switched)
        self._shadows = {
            shadow.position: Shadow(shadow.position, shadow.block_id, shadow.generation)
            for shadow in result.shadows
            if shadow.position not in switched
        }

    def lose(self, cause: HarborError) -> None:
        """Ends it, as its pool is not there any more."""
        self.end_with(self._lost(cause))

    def end_with(self, cause: HarborError) -> None:
        """Ends it, and has every later use raise `cause`."""
        if not self.ended:
            self._ended_by = cause
            self._end()

    def released(self, reply: cache.ReleaseResponse) -> None:
        """Takes in the result of its release."""
        (result,) = reply.results
        if result.status.code and not self.ended:
            raise refusals.from_item(result.status)
        self._end()

    def forget(self) -> None:
        """Takes in its end without a word to the service: what is not told with `held` is released."""
        self._end()

    def leave(self) -> None:
        """Takes in that it has perhaps been handed off."""
        self.leaving = True

    def handed_off(self, reply: cache.HandoffResponse) -> str:
        """Takes in that it is another's now; returns the token."""
        self._end()
        return reply.handoff_token

    def _end(self) -> None:
        self.ended = True
        if self.batch is not None:
            self.batch.note_end(self)

    def token_count_with(self, item: cache.CommitItem) -> int:
        """Returns how many tokens there are with those of a commit."""
        return self.token_count + len(item.new_token_ids) // TOKEN_BYTES

    def _advance(self, item: cache.CommitItem) -> None:
        self.token_count = self.token_count_with(item)
        self.computed_tokens = item.computed_tokens
        self.tail.append(item)

    def _lost(self, cause: HarborError) -> SequenceLost:
        return SequenceLost(
            f"the service's new process has not taken up sequence {self.id} ({cause.reason}: {cause}): allocate again",
            metadata={"sequenceId": self.id, "cause": cause.reason, **cause.metadata},
        )

    def _unchanging(self) -> AbstractContextManager[object]:
        """Keeps other threads from reading or changing the state inside of the context."""
        return contextlib.nullcontext()

    def warn_forgotten(self) -> None:
        """Says where the last name of a sequence went that nobody has released; for `__del__`, so it asks nobody."""
        warnings.warn(
            f"sequence {self.id} was not released: its blocks are held until the session ends; release it, "
            f"or leave its `with`",
            ResourceWarning,
            stacklevel=3,
            source=self,
        )


def _arrays(table: types_pb2.BlockTable) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint64]]:
    # Block ids are below 2**31, so the signed type that kernels want holds them all.
    return (
        np.frombuffer(table.block_ids, "<u4").astype(np.int32),
        np.frombuffer(table.generations, "<u8").astype(np.uint64),
    )
