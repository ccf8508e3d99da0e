"""A decode step of many running sequences without a call [C20]."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from kvharbor.client.credits import Credits
from kvharbor.client.decode_commits import Commits
from kvharbor.client.decode_rows import BLOCK, BLOCK_COUNT, OFFSET, PLACE, DecodeRows, Rows
from kvharbor.client.decode_state import DecodeState
from kvharbor.client.errors import (
    EpochEnded,
    Full,
    HarborError,
    InvalidField,
    PoolExhausted,
    SequenceInDoubt,
    Unavailable,
)
from kvharbor.client.standing import State
from kvharbor.client.tokens import Tokens, token_bytes

if TYPE_CHECKING:
    from kvharbor.client.pool import Pool
    from kvharbor.client.sequence import Sequence

LEASE_TIMEOUT_S = 1.0
NOBODY: Mapping[int, HarborError] = MappingProxyType({})


@dataclass(frozen=True, slots=True, eq=False)
class DecodeStep:
    """Where a step's tokens go. `slots` are as those of Sequence.slots, an entry for each of `rows`, in their order.

    `refused` has why a row has no slot, and its token was not taken: it is not in `rows` then.
    """

    slots: tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]
    rows: npt.NDArray[np.intp]
    refused: Mapping[int, HarborError]


class DecodeBatch:
    """Running sequences of one pool that get a token each step. Belongs to one thread at a time, with its sequences.

    A sequence joins when all of its tokens are computed and committed, e.g. after its prefill. `step` takes each one's
    next token and returns where the KV of these goes. It is called after the forward pass that has written the KV of
    all tokens before: so the KV of a step's tokens counts as computed with the next step, and never with this one.
    Blocks that are full by then are committed, in the background and in order, and tables grow by `credits`.

    Rows are numbered from 0; the last row's sequence gets the number of one that leaves. While a sequence is in the
    batch its own table and cursors are those of its last answered commit, and it is appended to by the batch alone;
    `tables` and `token_counts` are up to date.
    """

    def __init__(self, pool: "Pool", credits: Credits, *, lease_timeout_s: float = LEASE_TIMEOUT_S) -> None:
        self.pool = pool
        self._credits = credits
        self._lease_timeout_s = lease_timeout_s
        self._rows = DecodeRows(pool.block_tokens)
        self._state = DecodeState(pool, self._rows)
        self._held = pool.blocks.held
        pool.batches.add(self._state)

    def __len__(self) -> int:
        return self._rows.count

    @property
    def sequences(self) -> tuple["Sequence", ...]:
        """The sequences, by row."""
        return tuple(self._rows.sequences)

    @property
    def tables(self) -> npt.NDArray[np.int32]:
        """Block ids, (sequence_count, width), of no meaning beyond `block_counts`; valid until the next call."""
        return self._rows.tables[: self._rows.count]

    @property
    def block_counts(self) -> npt.NDArray[np.int64]:
        """Blocks of each row's table; valid until the next call."""
        return self._rows.cursors[BLOCK_COUNT, : self._rows.count]

    @property
    def token_counts(self) -> npt.NDArray[np.int64]:
        """Tokens of each row, those of the last step included."""
        cursors = self._rows.cursors[:, : self._rows.count]
        counts: npt.NDArray[np.int64] = cursors[PLACE] * self._rows.block_tokens + cursors[OFFSET]
        return counts

    def join(self, sequence: "Sequence") -> int:
        """Takes a sequence in, and returns its row, the last one; raises InvalidField unless all of it is computed.

        Raises SequenceInDoubt after an extend without an answer: what the batch appends would be in another place of
        the service's table.
        """
        sequence.require_usable()
        if sequence.outgrown:
            raise SequenceInDoubt(
                f"an extend of sequence {sequence.id} ended without an answer: extend it again, by 0 for what that gave"
            )
        if sequence.computed_tokens != sequence.token_count:
            raise InvalidField.of(
                "computed_tokens",
                sequence.computed_tokens,
                limit=f"the sequence's token_count, {sequence.token_count}",
                remedy="commit what is computed, and pass tokens that are not to `step`",
            )
        if sequence.has_switched:
            sequence.commit(sequence.computed_tokens)
        with self.pool.link.guard:
            sequence.batch = self
            return self._rows.add(sequence)

    def step(self, token_ids: Tokens) -> DecodeStep:
        """Appends one token to each row, and returns where its KV goes; the KV of all tokens before is written.

        Refused rows are left as they were, with PoolExhausted where there is no block for them: preempt one, by `leave`
        or `release`, and step the others again with the next tokens. A row whose sequence has ended, or whose commit
        was refused, is refused with that until it leaves. Waits for the device where blocks are full [C14]. Makes no
        call as long as there are credits.
        """
        rows = self._rows
        tokens = _checked(token_ids)
        if len(tokens) != rows.count:
            raise InvalidField.of(
                "token_ids",
                len(tokens),
                limit=f"one token a row, {rows.count}",
                remedy="name the rows' tokens in order",
            )
        self._held.stream.require_session()
        full = rows.full()
        if self._state.refused:
            full = self._state.going(full)
        lacking = rows.lacking(full)
        short = self._prepare(int(np.count_nonzero(lacking))) if len(full) else None
        with self.pool.link.guard:
            commits, refused = self._turn(full, lacking, short) if len(full) else (None, {})
            for row, sequence in enumerate(rows.sequences if self._state.refused else ()):
                if (error := self._state.refused.get(id(sequence))) is not None:
                    refused[row] = error
            if refused:
                going = np.setdiff1d(rows.numbers[: rows.count], [*refused])
                step = self._append(going, going, tokens[going], MappingProxyType(refused))
            else:
                step = self._append(slice(rows.count), rows.numbers[: rows.count], tokens, NOBODY)
            # Last, as the thread that is woken to send wants the interpreter for itself.
            if commits is not None:
                self._state.send(commits)
            self._credits.keep()
            return step

    def leave(self, sequence: "Sequence", *, timeout_s: float | None = None) -> None:
        """Lets a sequence go on by itself: all its tokens are told, and computed but for the last one's KV.

        Waits until that is answered; the sequence stays in the batch where it is not (Unavailable). Raises what a
        commit was refused with that no step has told of: the sequence is then as of the commit before.
        """
        row = self._row_of(sequence)
        known = self._state.refused.get(id(sequence))
        self._tell_all(np.array([row]), [sequence], timeout_s)
        with self.pool.link.guard:
            refusal = self._state.refused.get(id(sequence))
            self._state.take_out(sequence, self._row_of(sequence))
        if refusal is not known and refusal is not None:
            raise refusal

    def release(self, sequences: Iterable["Sequence"]) -> None:
        """Ends sequences of the batch, as their `release` does; not awaited. Those that have ended just leave.

        Waits for the device first [C14].
        """
        leaving = [*sequences]
        for sequence in leaving:
            self._row_of(sequence)
        self.pool.wait_for_device(self.pool.order.before_release)
        with self.pool.link.guard:
            for sequence in leaving:
                self._state.take_out(sequence, self._row_of(sequence))
            ending = [sequence for sequence in leaving if not sequence.ended]
            if ending:
                self._state.release(ending)

    def sync(self, *, timeout_s: float | None = None) -> None:
        """Brings the sequences themselves up to date, and waits until the service is; they stay in the batch."""
        rows = self._rows
        self._tell_all(rows.numbers[: rows.count], rows.sequences, timeout_s)
        with self.pool.link.guard:
            for sequence in rows.sequences:
                if not sequence.ended:
                    self._state.write_back(sequence)

    def note_end(self, sequence: "Sequence") -> None:
        """Takes in that a sequence has ended otherwise; for the sequence, under the guard."""
        self._state.note_end(sequence)

    def _prepare(self, needed: int) -> HarborError | None:
        """Waits for what was written, and has so many credits; returns why there are not enough."""
        self.pool.wait_for_device(self.pool.order.before_commit)
        if needed <= len(self._credits):
            return None
        standing = self.pool.link.standing
        if standing.state is not State.PRESENT:
            return standing.still_away()
        try:
            self._credits.require(needed, timeout_s=self._lease_timeout_s)
        except (Full, Unavailable, EpochEnded) as short:
            return short
        return None

    def _turn(
        self, full: Rows, lacking: npt.NDArray[np.bool_], short: HarborError | None
    ) -> tuple[Commits | None, dict[int, HarborError]]:
        """Goes on from full blocks to the next ones; returns the commits to send of them, and the rows that have none.

        A row that was refused since `full` was found commits in vain, and is refused by the step all the same.
        """
        rows, refused = self._rows, {}
        commits = None
        needed = int(np.count_nonzero(lacking))
        block_count = min(needed, len(self._credits))
        blocks = self._credits.draw(block_count)
        if block_count < needed:
            starved = full[lacking][block_count:]
            refused = dict.fromkeys(starved.tolist(), _no_block(short))
            kept = ~np.isin(full, starved)
            full, lacking = full[kept], lacking[kept]
        if len(full):
            # From now on they are the sequences'.
            self._held.own.give(blocks)
            ends = np.full(len(full), rows.block_tokens)
            commits = self._state.commits(full, ends=ends, computed=ends, growing=lacking, appended=blocks)
            rows.turn(full, lacking, blocks)
        return commits, refused

    def _append(
        self,
        where: Rows | slice,
        numbers: Rows,
        tokens: npt.NDArray[np.uint32],
        refused: Mapping[int, HarborError],
    ) -> DecodeStep:
        rows = self._rows
        slots = (rows.cursors[BLOCK][where].astype(np.int32), rows.cursors[OFFSET][where].copy())
        rows.append(where, tokens, numbers)
        return DecodeStep(slots, numbers, refused)

    def _tell_all(self, told: Rows, sequences: list["Sequence"], timeout_s: float | None) -> None:
        """Commits what is not under way yet, and waits until nothing is."""
        link = self.pool.link
        self.pool.wait_for_device(self.pool.order.before_commit)
        timeout_s = link.options.timeout_s if timeout_s is None else timeout_s
        with link.guard:
            rest = self._state.rest(told)
            if rest is not None:
                self._state.send(rest)

            def answered() -> bool:
                return link.standing.state is State.ENDED or not self._state.any_under_way(sequences)

            if not link.wait_for(answered, timeout_s):
                raise self._held.stream.late(timeout_s)

    def _row_of(self, sequence: "Sequence") -> int:
        row = self._rows.row_of(sequence)
        if row is None:
            raise InvalidField.of("sequence", sequence, limit="one of the batch", remedy="join it first")
        return row


def _checked(token_ids: Tokens) -> npt.NDArray[np.uint32]:
    if isinstance(token_ids, np.ndarray) and token_ids.dtype == np.uint32 and token_ids.ndim == 1:
        return cast("npt.NDArray[np.uint32]", token_ids)
    return np.frombuffer(token_bytes(token_ids), "<u4").astype(np.uint32, copy=False)


def _no_block(cause: HarborError | None) -> HarborError:
    if cause is not None and not isinstance(cause, PoolExhausted):
        return cause
    metadata = cause.metadata if cause is not None else {}
    return PoolExhausted(
        "no block is left for the row's next token: preempt a sequence, by `leave` or `release`, and step the others",
        metadata=metadata,
        retry_after_s=cause.retry_after_s if cause is not None else None,
    )
