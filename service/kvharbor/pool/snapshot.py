"""The index as it stood at one revision, to be told while the pool goes on.

What describes it is copied in one step, some ten nanoseconds a block; chains are then read off the copy as slowly
as their reader likes.
"""

from collections.abc import Iterator

from kvharbor.pool.digest import DIGEST_BYTES
from kvharbor.pool.events import BlocksStored
from kvharbor.pool.namespaces import NO_BLOCK
from kvharbor.pool.state import State


class IndexCopy:
    """What links and names the blocks of one tenant's namespaces, or of all."""

    def __init__(self, state: State, tenant: str | None) -> None:
        self._revision = state.revision
        self._roots = [
            (one.tenant, one.digest, one.first_child)
            for one in state.namespaces
            if tenant is None or one.tenant == tenant
        ]
        self._first_child, self._next_sibling, self._digests = state.tree.copied_columns()
        self._generation = state.blocks.generation[:]

    def chains(self, most_blocks: int | None = None) -> Iterator[BlocksStored]:
        """Yields everything, parents before children; a chain longer than `most_blocks` comes in parts."""
        for tenant, root_digest, first_child in self._roots:
            # Of each family the member that is next; the others are found from it, so that nothing here is long.
            pending = [(root_digest, first_child)] if first_child != NO_BLOCK else []
            while pending:
                parent_digest, block = pending.pop()
                self._put_sibling(pending, parent_digest, block)
                chain = [block]
                while (block := self._first_child[block]) != NO_BLOCK:
                    self._put_sibling(pending, self._digest_of(chain[-1]), block)
                    if len(chain) == most_blocks:
                        yield self._event(tenant, parent_digest, chain)
                        parent_digest, chain = self._digest_of(chain[-1]), []
                    chain.append(block)
                yield self._event(tenant, parent_digest, chain)

    def _put_sibling(self, pending: list[tuple[bytes, int]], parent_digest: bytes, block: int) -> None:
        sibling = self._next_sibling[block]
        if sibling != NO_BLOCK:
            pending.append((parent_digest, sibling))

    def _digest_of(self, block: int) -> bytes:
        return self._digests[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]

    def _event(self, tenant: str, parent_digest: bytes, chain: list[int]) -> BlocksStored:
        generation = self._generation
        return BlocksStored(
            self._revision,
            tenant,
            parent_digest,
            tuple([self._digest_of(block) for block in chain]),
            tuple(chain),
            tuple([generation[block] for block in chain]),
        )
