"""Commits of running sequences: one message, made in the thread that sends it, and its answer."""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvharbor.client import refusals
from kvharbor.client.decode_rows import BLOCK, COMPUTED, GENERATION, PLACE, TOLD, Column
from kvharbor.client.errors import HarborError
from kvharbor.client.outbox import Outgoing
from kvharbor.client.runs import BlockRun, table_of
from kvharbor.client.tokens import TOKEN_BYTES
from kvharbor.v1 import cache_service_pb2 as cache
from kvharbor.v1 import stream_service_pb2 as stream_pb2

if TYPE_CHECKING:
    from kvharbor.client.decode_state import DecodeState
    from kvharbor.client.sequence import Sequence


class Commits:
    """One commit a sequence: of its last block's tokens up to `ends`, of which `computed` are computed.

    An entry a sequence: `cursors` are its row's, `tokens` the bytes of its last block's, before the commit. `appended`
    has a block for each that is `growing`, in order.
    """

    def __init__(
        self,
        state: "DecodeState",
        sequences: list["Sequence"],
        cursors: list[Column],
        tokens: list[bytes],
        *,
        ends: Column,
        computed: Column,
        growing: npt.NDArray[np.bool_],
        appended: BlockRun,
    ) -> None:
        self.sequences = sequences
        self._state = state
        self._cursors = cursors
        self._tokens = tokens
        self._ends = ends
        self._computed = computed
        self._growing = growing
        self._appended = appended
        self._items: list[cache.CommitItem] | None = None
        self._pool_id = state.pool.id
        self._block_tokens = state.pool.block_tokens
        self.outgoing = Outgoing(self._message, self._take, self._fail, told=self._told)

    def items(self) -> list[cache.CommitItem]:
        """Returns them as messages; made once, by whoever needs them first."""
        if self._items is None:
            self._items = self._made()
        return self._items

    def tell_here(self) -> None:
        """Has the sequences tell the service's next process of it; under the guard."""
        for sequence, item in zip(self.sequences, self.items(), strict=True):
            self._state.write_back(sequence)
            outcome = sequence.committed_here(item)
            if isinstance(outcome, HarborError):
                self._state.note_refusal(sequence, item, outcome)

    def _made(self) -> list[cache.CommitItem]:
        cursors = self._cursors
        blocks = BlockRun(cursors[BLOCK].astype(np.uint32), cursors[GENERATION].view(np.uint64))
        rows = zip(
            self.sequences,
            self._tokens,
            (cursors[PLACE] * self._block_tokens).tolist(),
            cursors[TOLD].tolist(),
            cursors[COMPUTED].tolist(),
            self._ends.tolist(),
            self._computed.tolist(),
            self._growing.tolist(),
            strict=True,
        )
        items = []
        appended = 0
        for row, (sequence, tokens, start, told, computed_before, end, computed, grows) in enumerate(rows):
            item = cache.CommitItem(
                sequence_id=sequence.id,
                computed_tokens=start + computed,
                new_token_ids=tokens[told * TOKEN_BYTES : end * TOKEN_BYTES],
                known_token_count=start + told,
            )
            if computed > computed_before:
                item.written.CopyFrom(table_of(blocks[row : row + 1]))
            if grows:
                item.appended.CopyFrom(table_of(self._appended[appended : appended + 1]))
                appended += 1
            items.append(item)
        return items

    def _message(self, _: Outgoing) -> stream_pb2.ConverseRequest:
        return stream_pb2.ConverseRequest(commit=cache.CommitRequest(pool_id=self._pool_id, items=self.items()))

    def _take(self, response: stream_pb2.ConverseResponse) -> None:
        if response.WhichOneof("result") == "refusal":
            self._fail(refusals.from_item(response.refusal))
            return
        for sequence, item, result in zip(self.sequences, self.items(), response.commit.results, strict=True):
            outcome = sequence.committed(item, result)
            self._state.note_answer(sequence)
            if isinstance(outcome, HarborError):
                self._state.note_refusal(sequence, item, outcome)

    def _told(self) -> None:
        self.tell_here()
        for sequence in self.sequences:
            self._state.note_answer(sequence)

    def _fail(self, cause: HarborError) -> None:
        for sequence, item in zip(self.sequences, self.items(), strict=True):
            self._state.note_answer(sequence)
            self._state.note_refusal(sequence, item, cause)
