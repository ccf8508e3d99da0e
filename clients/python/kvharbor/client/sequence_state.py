"""What a client knows of its sequence: table, cursors, shadows. No I/O; sync and asyncio sequences are this.

cached_tokens <= computed_tokens <= token_count <= capacity_tokens.
"""

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvharbor.client import refusals
from kvharbor.client.calls import key_messages, request, whole
from kvharbor.client.errors import HarborError, InvalidField, SequenceEnded, SequenceInDoubt
from kvharbor.client.results import CommitResult, ExtraKey, Shadow
from kvharbor.client.tokens import TOKEN_BYTES, Tokens, token_bytes
from kvharbor.v1 import cache_service_pb2 as cache
from kvharbor.v1 import types_pb2

MAX_SWITCHED = 65_536
"""So many the service takes with one commit; the others are reported with the next."""


class SequenceState:
    """One request's block table and cursors, as of the last reply.

    `table` holds block ids (int32), entry i for tokens [i * block_tokens, (i + 1) * block_tokens), and
    `generations` (uint64) their generations. Both are replaced, never changed in place: a table handed out
    stays what it was. KV may be written at positions [cached_tokens, capacity_tokens).
    """

    ended = True
    """Whether it was released or handed off by this process; also while it is being made, for `__del__`."""

    def __init__(self, message: types_pb2.Sequence, block_tokens: int) -> None:
        self.id = message.sequence_id
        self.request_id = message.request_id
        self.group = message.group
        self.block_tokens = block_tokens
        self.table, self.generations = _arrays(message.table)
        self.cached_tokens = message.cached_tokens
        self.computed_tokens = message.computed_tokens
        self.token_count = message.token_count
        self.capacity_tokens = message.capacity_tokens
        self.ended = False
        self._in_doubt = False
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
        SequenceEnded after release or hand-off, when the blocks may be others' already, and SequenceInDoubt [C5].
        """
        self.require_usable()
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

    def require_usable(self) -> None:
        """Raises SequenceEnded after release or hand-off, SequenceInDoubt after a call without an answer [C5]."""
        if self.ended:
            raise SequenceEnded(f"sequence {self.id} was released or handed off: allocate a new one")
        if self._in_doubt:
            raise SequenceInDoubt(
                f"a call on sequence {self.id} ended without an answer, its table and cursors are uncertain: "
                f"release it and allocate again"
            )

    def extend_item(self, token_count: int) -> cache.ExtendItem:
        """Asks for capacity for so many more tokens than it has."""
        self.require_usable()
        if whole("token_count", token_count) < 0:
            raise InvalidField.of("token_count", token_count, limit="at least 0", remedy="capacity never shrinks")
        return request(cache.ExtendItem, sequence_id=self.id, capacity_tokens=self.capacity_tokens + token_count)

    def commit_item(
        self, computed_tokens: int, new_tokens: Tokens, extra_keys: Sequence[ExtraKey] = ()
    ) -> cache.CommitItem:
        """Names what is written, with the blocks that hold it by the table, so that a wrong table is noticed."""
        self.require_usable()
        item = request(
            cache.CommitItem,
            sequence_id=self.id,
            computed_tokens=computed_tokens,
            new_token_ids=token_bytes(new_tokens, "new_tokens"),
            switched_positions=self._switched[:MAX_SWITCHED],
        )
        if extra_keys:
            item.extra_keys.extend(key_messages(extra_keys))
        if item.computed_tokens > self.computed_tokens:
            first, end = self.computed_tokens // self.block_tokens, -(-item.computed_tokens // self.block_tokens)
            item.written.block_ids = self.table[first:end].astype("<u4").tobytes()
            item.written.generations = self.generations[first:end].astype("<u8").tobytes()
        return item

    def extended(self, result: cache.ExtendResult) -> HarborError | None:
        """Takes in the result of an extend_item; returns its refusal, if it is one."""
        if result.status.code:
            return refusals.from_item(result.status)
        if result.added.block_ids:
            table, generations = _arrays(result.added)
            self.table = np.concatenate([self.table, table])
            self.generations = np.concatenate([self.generations, generations])
        self.capacity_tokens = result.capacity_tokens
        return None

    def committed(self, item: cache.CommitItem, result: cache.CommitResult) -> CommitResult | HarborError:
        """Takes in the result of `item`; returns its refusal, if it is one."""
        if result.status.code:
            return refusals.from_item(result.status)
        self.computed_tokens = item.computed_tokens
        self.token_count += len(item.new_token_ids) // TOKEN_BYTES
        self._switched = self._switched[len(item.switched_positions) :]
        shadows = tuple(Shadow(shadow.position, shadow.block_id, shadow.generation) for shadow in result.shadows)
        self._shadows.update((shadow.position, shadow) for shadow in shadows)
        return CommitResult(result.committed_tokens, shadows)

    def released(self, reply: cache.ReleaseResponse) -> None:
        """Takes in the result of its release."""
        (result,) = reply.results
        if result.status.code:
            raise refusals.from_item(result.status)
        self.ended = True

    def warn_forgotten(self) -> None:
        """Says where the last name of a sequence went that nobody has released; for `__del__`, so it asks nobody."""
        warnings.warn(
            f"sequence {self.id} was not released: its blocks are held until the session ends; release it, "
            f"or leave its `with`",
            ResourceWarning,
            stacklevel=3,
            source=self,
        )


@contextlib.contextmanager
def doubting(sequences: Iterable[SequenceState]) -> Iterator[None]:
    """Marks sequences as in doubt when the block ends without telling whether its call took effect [C5].

    Without this a commit that was repeated after a lost reply would append its tokens twice, and the pool
    would hold bytes under tokens that they do not belong to [G1].
    """
    try:
        yield
    except HarborError as failure:
        if failure.outcome_unknown:
            _doubt(sequences)
        raise
    except BaseException:  # cancelled or interrupted on the way
        _doubt(sequences)
        raise


def _doubt(sequences: Iterable[SequenceState]) -> None:
    for sequence in sequences:
        sequence._in_doubt = True


def _arrays(table: types_pb2.BlockTable) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint64]]:
    # Block ids are below 2**31, so the signed type that kernels want holds them all.
    return (
        np.frombuffer(table.block_ids, "<u4").astype(np.int32),
        np.frombuffer(table.generations, "<u8").astype(np.uint64),
    )
