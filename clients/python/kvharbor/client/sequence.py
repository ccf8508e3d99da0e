"""A sequence of the synchronous client."""

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Self

from kvharbor.client.batches import Commit, only
from kvharbor.client.errors import HarborError, SessionGone
from kvharbor.client.results import CommitResult, ExtraKey
from kvharbor.client.sequence_state import SequenceState, doubting
from kvharbor.client.tokens import Tokens
from kvharbor.v1 import cache_service_pb2 as cache
from kvharbor.v1 import types_pb2

if TYPE_CHECKING:
    from kvharbor.client.pool import Pool


class Sequence(SequenceState):
    """A held prompt: what was there is readable, the rest is writable. Belongs to one thread at a time.

    Leaving its `with` releases it.
    """

    def __init__(self, pool: "Pool", message: types_pb2.Sequence) -> None:
        self._pool = pool
        super().__init__(message, pool.block_tokens)
        pool.sequences.add(self)

    def __del__(self) -> None:
        if not self.ended and self._pool.link.session_lives:
            self.warn_forgotten()

    def extend(self, token_count: int) -> None:
        """Adds capacity for so many more tokens, in whole blocks.

        Raises PoolExhausted when there is none: release a sequence, e.g. by preempting one.
        """
        only(self._pool.extend_many([(self, token_count)]))

    def commit(
        self, computed_tokens: int, new_tokens: Tokens = (), *, extra_keys: Items[ExtraKey] = ()
    ) -> CommitResult:
        """Declares the KV of the first computed_tokens tokens written and visible, and publishes full blocks.

        `new_tokens` are the ids generated since the last commit; their own KV may come with a later one.
        """
        return only(self._pool.commit_many([Commit(self, computed_tokens, new_tokens, extra_keys)]))

    def fork(self, child_count: int, *, reserve_tokens: int = 0, group: str = "") -> list["Sequence"]:
        """Returns children that share the committed blocks and own a copy of the rest that is computed."""
        self.require_usable()
        call = self._pool.calls.fork(self.id, child_count, reserve_tokens=reserve_tokens, group=group)
        reply = self._pool.link.run(call)
        return [Sequence(self._pool, child) for child in reply.children]

    def handoff(self, computed_tokens: int, new_tokens: Tokens = ()) -> str:
        """Commits and gives the sequence away; returns the secret token to adopt it with, once.

        The sequence ends here: this process touches its blocks no more. A token that nobody adopts within the
        service's limit (30 s by default) releases it.
        """
        call = self._pool.calls.handoff(self.commit_item(computed_tokens, new_tokens))
        with doubting([self]):
            reply = self._pool.link.run(call)
        self.ended = True
        return reply.handoff_token

    def release(self) -> None:
        """Ends the sequence: committed blocks stay cached, the rest is free. Repeating it does nothing.

        A session that has ended has released it already, so that is no error.
        """
        if self.ended:
            return
        try:
            reply = self._pool.link.run(self._pool.calls.release([cache.ReleaseItem(sequence_id=self.id)]))
        except SessionGone:
            self.ended = True
            return
        self.released(reply)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *rest: object) -> None:
        try:
            self.release()
        except HarborError:
            # The error that ended the block says more than one that follows from it.
            if exc_type is None:
                raise
