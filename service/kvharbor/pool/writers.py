"""Single flight: which live sequence is computing which block, beside the index. Rules [W1] to [W8].

Sessions whose engines keep their own tables are in it too, with marks of what they compute (`marks.py`).

A sequence computes its blocks in order, so one entry tells all that are pending in it: the key of the first one, as
the tree would have it, with the bytes of its tail behind that. Entering, moving and leaving are O(1), whatever the
length of the prompt, and nothing is hashed but that one key.
"""

from collections.abc import Mapping
from typing import Final, Protocol

from kvharbor.pool.awaiting import Awaited, Awaiting, Outlook
from kvharbor.pool.digest import OPAQUE_KEY_BYTES
from kvharbor.pool.namespaces import FIRST_ROOT, Namespace
from kvharbor.pool.results import Pending
from kvharbor.pool.tree import PARENT_BYTES, PrefixTree

PATIENCE_S: Final = 2.0
"""A writer that has committed nothing for so long counts as stalled [W5], unless its session is at work [W7]."""
LONGEST_STEP_S: Final = 60.0
"""It does after so long without a commit, whatever its session says."""


class Writer(Protocol):
    """A sequence or a mark: the contents in `tail`, and the `extras` of its blocks, come behind `chain_node`.

    Extras are by block, counted so that the first one to come is `committed_blocks`. The table of writers sets where it
    stands there, and when it has last got on.
    """

    session: int
    namespace: Namespace
    chain_node: int
    committed_blocks: int
    tail: bytearray
    extras: dict[int, bytes]
    writer_key: bytes | None
    progress_at: float


class Writers:
    """Sequences with a full block of known tokens that is not committed, by the key of the first such block.

    At each key they are grouped by session, the one that got on last at the end. So whoever asks finds another
    session's without looking at its own, however many those are.
    """

    def __init__(self, tree: PrefixTree, generation: list[int], block_tokens: int, awaiting: Awaiting) -> None:
        self._tree = tree
        self._generation = generation
        self._block_bytes = 4 * block_tokens
        self._block_tokens = block_tokens
        self._awaiting = awaiting
        self.by_key: dict[bytes, dict[int, dict[Writer, None]]] = {}
        # When each session has last said that it is at work.
        self.signs: dict[int, float] = {}

    def content_bytes(self, namespace: Namespace) -> int:
        """Returns the size of a block's content in a namespace, without extra keys."""
        return OPAQUE_KEY_BYTES if namespace.is_opaque else self._block_bytes

    def key_of(self, sequence: Writer) -> bytes | None:
        """Returns the key of the first block that a sequence has still to commit, if all its tokens are known."""
        tail = sequence.tail
        if not tail:
            return None
        size = OPAQUE_KEY_BYTES if sequence.namespace.is_opaque else self._block_bytes  # without a call a request
        if len(tail) < size:
            return None
        key = self._key(sequence.chain_node, tail[:size])
        return key + sequence.extras.get(sequence.committed_blocks, b"") if sequence.extras else key

    def is_computed(self, node: int, content: bytes) -> bool:
        """Whether a live sequence, of any session, is computing the block of this content behind a node."""
        return self._key(node, content) in self.by_key

    def own(self, session: int, node: int, content: bytes) -> list[Writer]:
        """Returns a session's writers of the block of this content behind a node."""
        return list(self.by_key.get(self._key(node, content), {}).get(session, ()))

    def place(self, sequence: Writer, now: float) -> None:
        """Enters a sequence, moves it or takes it out, by what it has still to commit [W1]."""
        key = self.key_of(sequence)
        if key != sequence.writer_key:
            self.remove(sequence)
            if key is not None:
                self.by_key.setdefault(key, {}).setdefault(sequence.session, {})[sequence] = None
                sequence.writer_key, sequence.progress_at = key, now

    def note_progress(self, sequence: Writer, now: float) -> None:
        """A sequence has committed something, if only a part of a block."""
        if sequence.writer_key is not None:
            sequence.progress_at = now
            own = self.by_key[sequence.writer_key][sequence.session]
            if len(own) > 1:
                del own[sequence]
                own[sequence] = None

    def has_stalled(self, writer: Writer, now: float) -> bool:
        """Whether a writer has neither committed anything for too long, nor its session said that it is at work."""
        return now >= self._stalls_at(writer)

    def remove(self, sequence: Writer) -> None:
        """Takes a sequence out, and has those who wait for its block look again; nothing if it is not in."""
        key = sequence.writer_key
        if key is None:
            return
        sessions = self.by_key[key]
        own = sessions[sequence.session]
        del own[sequence]
        if not own:
            del sessions[sequence.session]
            if not sessions:
                del self.by_key[key]
        sequence.writer_key = None
        if self._awaiting.by_key:
            self._awaiting.move((key,))

    def pending(self, sequence: Writer, reusable_blocks: int, now: float) -> Pending | None:
        """Tells what of a new sequence's prompt, up to `reusable_blocks`, another session is computing [W2]."""
        key, first = sequence.writer_key or self.key_of(sequence), sequence.committed_blocks
        if key is None or first >= reusable_blocks:
            return None
        sessions = self.by_key.get(key)
        if sessions is None or (len(sessions) == 1 and sequence.session in sessions):
            return None
        writer = self._other(key, sequence.session, now)
        if writer is None:
            return None
        block_count = min(self._shared_count(writer, sequence), reusable_blocks - first)
        return Pending(block_count * self._block_tokens, writer.session, now - self._alive_at(writer))

    def worth_waiting_for(self, writer: Writer, reusable_blocks: int, now: float) -> Pending | None:
        """Tells what is pending for one that may become a writer, if others get on with it and not its own session."""
        key = self.key_of(writer)
        if key is None or writer.session in self.by_key.get(key, ()):
            return None
        pending = self.pending(writer, reusable_blocks, now)
        return None if pending is None or pending.idle_s >= PATIENCE_S else pending

    def wait(
        self,
        session: int,
        token_ids: bytes,
        extras: Mapping[int, bytes],
        *,
        depth: int,
        reusable_blocks: int,
        node: int,
        now: float,
    ) -> Awaited | None:
        """Begins to wait for the next block of a prompt, if another session's live sequence is computing it [W3]."""
        if depth >= reusable_blocks:
            return None
        key = self._key(node, self._tree.content(token_ids, depth * self._block_bytes, extras.get(depth)))
        writer = self._worth_waiting_for(key, session, now)
        if writer is None:
            return None
        generation = 0 if node >= FIRST_ROOT else self._generation[node]
        stalls_at = self._stalls_at(writer)
        awaited = Awaited(session, token_ids, extras, reusable_blocks, depth, node, generation, key, stalls_at)
        self._awaiting.add(awaited)
        return awaited

    def look_again(self, awaited: Awaited, now: float) -> Outlook:
        """Moves a waiter past what is committed by now, and tells whether it goes on waiting. O(blocks committed)."""
        self._awaiting.discard(awaited)
        # Nobody computes below a node that is gone. What has begun anew since is for another Allocate to find.
        if awaited.node < FIRST_ROOT and self._generation[awaited.node] != awaited.generation:
            return Outlook.ABANDONED
        run = self._tree.match(awaited.node, awaited.token_ids, awaited.extras, awaited.depth, awaited.reusable_blocks)
        if run:
            awaited.depth += len(run)
            awaited.node, awaited.generation = run[-1], self._generation[run[-1]]
            if awaited.depth == awaited.reusable_blocks:
                return Outlook.ARRIVED
            offset = awaited.depth * self._block_bytes
            content = self._tree.content(awaited.token_ids, offset, awaited.extras.get(awaited.depth))
            awaited.key = self._key(awaited.node, content)
        writer = self._worth_waiting_for(awaited.key, awaited.session, now)
        if writer is None:
            return Outlook.ARRIVED if run else Outlook.ABANDONED
        awaited.stalls_at = self._stalls_at(writer)
        self._awaiting.add(awaited)
        return Outlook.PENDING

    def _key(self, node: int, content: bytes | bytearray) -> bytes:
        return node.to_bytes(PARENT_BYTES, "little") + content

    def _worth_waiting_for(self, key: bytes, session: int, now: float) -> Writer | None:
        """Returns a writer of the block that has not stalled; None for a session that computes it itself."""
        if session in self.by_key.get(key, ()):
            return None
        writer = self._other(key, session, now)
        return None if writer is None or self.has_stalled(writer, now) else writer

    def _other(self, key: bytes, session: int, now: float) -> Writer | None:
        """Returns another session's writer of a block: the first that has not stalled, else the first."""
        first = None
        for owner, sequences in self.by_key.get(key, {}).items():
            if owner != session:
                writer = next(reversed(sequences))
                if not self.has_stalled(writer, now):
                    return writer
                first = first or writer
        return first

    def _stalls_at(self, writer: Writer) -> float:
        return self._alive_at(writer) + PATIENCE_S

    def _alive_at(self, writer: Writer) -> float:
        """Returns when a writer has last committed something, or its session said that it is at work [W7]."""
        progress_at = writer.progress_at
        sign_at = self.signs.get(writer.session, progress_at)
        return max(progress_at, min(sign_at, progress_at + LONGEST_STEP_S - PATIENCE_S))

    def _shared_count(self, writer: Writer, sequence: Writer) -> int:
        """Returns how many blocks two sequences at one key have in common from there on; at least that one."""
        size = self.content_bytes(sequence.namespace)
        return common_block_count(sequence.tail, extras_to_come(sequence), writer.tail, extras_to_come(writer), size)


def extras_to_come(writer: Writer) -> Mapping[int, bytes]:
    """Returns the extras of a writer's blocks that are not committed, counted from the first of them."""
    first = writer.committed_blocks
    if not first or not writer.extras:
        return writer.extras
    return {position - first: extra for position, extra in writer.extras.items() if position >= first}


def common_block_count(
    ours: bytes | bytearray,
    our_extras: Mapping[int, bytes],
    theirs: bytes | bytearray,
    their_extras: Mapping[int, bytes],
    size: int,
) -> int:
    """Returns how many leading blocks of `size` bytes two contents have in common."""
    least, most = 0, min(len(ours), len(theirs)) // size
    while least < most:
        middle = (least + most + 1) // 2
        if ours[least * size : middle * size] == theirs[least * size : middle * size]:
            least = middle
        else:
            most = middle - 1
    differing = [
        position
        for position in our_extras.keys() | their_extras.keys()
        if our_extras.get(position) != their_extras.get(position)
    ]
    return min(least, min(differing, default=least))
