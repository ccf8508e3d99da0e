"""What sessions should be known to compute block by block, on top of the naive model of what they hold."""

from naive import Content, NaiveSequence, Path
from naive_blocks import NaiveBlocks


class NaiveMarks(NaiveBlocks):
    """As NaiveBlocks, with marks [B6]: each is written as a sequence that has no blocks, in the namespace ""."""

    def __init__(self, block_count: int, block_tokens: int, most_entries: int) -> None:
        super().__init__(block_count, block_tokens, most_entries)
        self.marks: list[NaiveSequence] = []
        self.signs: dict[int, float] = {}
        """When each session has last said that it is at work [W7]."""
        self.asked_at: dict[NaiveSequence, float] = {}
        """When each mark's chain was last acquired."""

    def computing(self, namespace: str, tokens: list[int], block: int) -> list[NaiveSequence]:
        sequences, self.sequences = self.sequences, [*self.sequences, *self.marks]
        try:
            return super().computing(namespace, tokens, block)
        finally:
            self.sequences = sequences

    def commit_blocks(self, session: int, behind: Path | None, namespace: str, contents: list[Content]) -> list[int]:
        shadows = super().commit_blocks(session, behind, namespace, contents)
        before = () if behind is None else behind[1]
        self._advance(session, namespace, (*before, *contents), first=len(before))
        return shadows

    def acquire(self, session: int, namespace: str, tokens: list[int], table: int) -> tuple[int, int]:
        held_count, leased_count = super().acquire(session, namespace, tokens, table)
        if held_count:
            self._advance(session, *self.paths(namespace, tokens)[held_count - 1], first=0)
        return held_count, leased_count

    def mark(self, session: int, tokens: list[int], committed: int) -> None:
        """A session computes a chain from a block on, if that is not too much; to say so again is a sign."""
        for mark in self.marks_of(session):
            if (mark.tokens, mark.committed) == (tokens, committed):
                self.signs[session] = self.asked_at[mark] = self.now
                return
        marked = sum(len(self.chunks(one)) - one.committed for one in self.marks_of(session))
        count = len(tokens) // self.block_tokens
        if committed < count and marked + count - committed <= self.total:
            mark = NaiveSequence(session, "", tokens, 0, 0, 0, committed, progress_at=self.now)
            self.asked_at[mark] = self.now
            self.marks.append(mark)

    def abandon(self, session: int, tokens: list[int]) -> None:
        """[B8]"""
        self.marks = [one for one in self.marks if (one.session, one.tokens) != (session, tokens)]

    def end_unheld(self, sessions: list[int]) -> None:
        """[B6] Marks end with what they are behind, and with their session."""
        self.marks = [
            one
            for one in self.marks
            if one.session in sessions and (not one.committed or self.place(one) in self.of(one.session).held)
        ]

    def marks_of(self, session: int) -> list[NaiveSequence]:
        return [one for one in self.marks if one.session == session]

    def _advance(self, session: int, namespace: str, held: tuple[Content, ...], *, first: int) -> None:
        """[B6] Moves a session's marks as far as they agree with what it holds from now on, from block `first` on."""
        for mark in self.marks_of(session):
            if mark.namespace == namespace and first <= mark.committed:
                chunks, count = self.chunks(mark), mark.committed
                while chunks[: count + 1] == held[: count + 1] and count < len(held):
                    count += 1
                if count > mark.committed:
                    mark.committed, mark.progress_at = count, self.now
        self.marks = [mark for mark in self.marks if mark.committed < len(self.chunks(mark))]

    def place(self, mark: NaiveSequence) -> Path:
        """The block that a mark is behind."""
        return (mark.namespace, self.chunks(mark)[: mark.committed])

    def chunks(self, mark: NaiveSequence) -> tuple[Content, ...]:
        paths = self.paths(mark.namespace, mark.tokens)
        return paths[-1][1] if paths else ()
