"""What a decode batch has that the service has not answered yet, or has refused."""

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from kvharbor.client.decode_commits import Commits
from kvharbor.client.decode_rows import COMPUTED, OFFSET, TOLD, DecodeRows, Rows
from kvharbor.client.errors import EpochEnded, HarborError, SessionGone
from kvharbor.client.outbox import Outgoing
from kvharbor.client.runs import NO_BLOCKS, BlockRun, run_of
from kvharbor.v1 import cache_service_pb2 as cache
from kvharbor.v1 import stream_service_pb2 as stream_pb2

if TYPE_CHECKING:
    from kvharbor.client.pool import Pool
    from kvharbor.client.sequence import Sequence


class DecodeState:
    """The rows with their commits under way. All is called under the link's guard.

    `refused` has why a sequence goes on no more, by its id(). Blocks that a refused commit was to append stay where
    they are until the sequence is taken out: a forward pass may still write to them.
    """

    def __init__(self, pool: "Pool", rows: DecodeRows) -> None:
        self.pool = pool
        self.rows = rows
        self.refused: dict[int, HarborError] = {}
        self._held = pool.blocks.held
        self._unaccepted: dict[int, list[BlockRun]] = {}
        self._under_way: Counter[int] = Counter()

    def bring_up_to_date(self) -> None:
        """Has the sequences themselves tell the service's next process all that is here."""
        for sequence in self.rows.sequences:
            if not sequence.ended:
                self.write_back(sequence)
        rest = self.rest(self.rows.numbers[: self.rows.count])
        if rest is not None:
            rest.tell_here()

    def write_back(self, sequence: "Sequence") -> None:
        """Gives a sequence its table, while it is here."""
        if (row := self.rows.row_of(sequence)) is not None:
            self.rows.write_back(row)
            if unaccepted := self._unaccepted.get(id(sequence)):
                sequence.shorten(len(unaccepted))

    def take_out(self, sequence: "Sequence", row: int) -> None:
        """Lets a sequence go, with its table."""
        if not sequence.ended:
            self.write_back(sequence)
            self._held.release_fresh(self._unaccepted.get(id(sequence), ()))
        self.refused.pop(id(sequence), None)
        self._unaccepted.pop(id(sequence), None)
        sequence.batch = None
        self.rows.remove(row)

    def note_end(self, sequence: "Sequence") -> None:
        """Takes in that a sequence has ended."""
        try:
            sequence.require_held()
        except HarborError as ended:
            self.refused.setdefault(id(sequence), ended)

    def note_answer(self, sequence: "Sequence") -> None:
        """Takes in that a commit of a sequence is answered."""
        self._under_way[id(sequence)] -= 1
        if not self._under_way[id(sequence)]:
            del self._under_way[id(sequence)]

    def note_refusal(self, sequence: "Sequence", item: cache.CommitItem, refusal: HarborError) -> None:
        """Takes in that a commit is refused, as all behind it are."""
        unaccepted = run_of(item.appended)
        if self.rows.row_of(sequence) is None:
            if not isinstance(refusal, EpochEnded | SessionGone):
                self._held.release_fresh([unaccepted])
            return
        self.refused.setdefault(id(sequence), refusal)
        if len(unaccepted):
            self._unaccepted.setdefault(id(sequence), []).append(unaccepted)

    def any_under_way(self, sequences: Iterable["Sequence"]) -> bool:
        """Whether a commit of one of them is still to be answered."""
        return any(id(sequence) in self._under_way for sequence in sequences)

    def going(self, rows: Rows) -> Rows:
        """Returns those of the rows that nothing has refused."""
        if not self.refused:
            return rows
        sequences = self.rows.sequences
        return np.array([row for row in rows.tolist() if id(sequences[row]) not in self.refused], np.intp)

    def commits(self, numbers: Rows, **what: Any) -> Commits:
        """Returns commits of rows as they are now."""
        rows, listed = self.rows, numbers.tolist()
        sequences = [rows.sequences[row] for row in listed]
        cursors = [column[numbers] for column in rows.cursors]
        return Commits(self, sequences, cursors, [rows.tokens[row].tobytes() for row in listed], **what)

    def rest(self, rows: Rows) -> Commits | None:
        """Returns what there is to tell of rows beyond what is told, which counts as told from then on."""
        rows = self.going(rows)
        cursors = self.rows.cursors[:, rows]
        ends, computed = cursors[OFFSET], np.maximum(cursors[COMPUTED], cursors[OFFSET] - 1)
        more = (cursors[TOLD] < ends) | (cursors[COMPUTED] < computed)
        rows, ends, computed = rows[more], ends[more], computed[more]
        if not len(rows):
            return None
        rest = self.commits(
            rows, ends=ends, computed=computed, growing=np.zeros(len(rows), np.bool_), appended=NO_BLOCKS
        )
        self.rows.cursors[TOLD, rows] = ends
        self.rows.cursors[COMPUTED, rows] = computed
        return rest

    def send(self, commits: Commits) -> None:
        """Has commits sent, in order."""
        self._under_way.update(map(id, commits.sequences))
        self._held.stream.put(commits.outgoing)

    def release(self, sequences: list["Sequence"]) -> None:
        """Ends sequences that were taken out, behind their commits."""
        message = cache.ReleaseRequest(
            pool_id=self.pool.id, items=[cache.ReleaseItem(sequence_id=each.id) for each in sequences]
        )

        def take(response: stream_pb2.ConverseResponse) -> None:
            self._held.refuse_if_refused(response)

        def told() -> None:
            # Not named to the next process they are released; what is untold of them is to be published first.
            self.pool.sequences.owed.extend(sequence for sequence in sequences if sequence.untold)

        for sequence in sequences:
            sequence.forget()
        self._held.stream.put(
            Outgoing(lambda _: stream_pb2.ConverseRequest(release=message), take, self._held.refuse, told=told)
        )
