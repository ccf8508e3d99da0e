"""Block tables that an engine keeps itself, and how often it uses each block: its session holds a block once or not."""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from chaos.board import Count
from chaos.held import Fence, WrongBytes
from chaos.stamps import BLOCK_TOKENS, slots, stamps, verify, write
from chaos.universe import keys, variant
from kvharbor.client import BlockRun, CommitChain, Namespace, Pool
from kvharbor.client.chains import KEY_BYTES

_SPOILT = 0xEE


@dataclass(slots=True, eq=False)
class Table:
    """One request: whole blocks of tokens, and the blocks for them, as many or more, in order.

    The first `committed` ones have been committed, by a call that may be under way, or `found` so. Of these the first
    `left` are not used any more. All is void in any but its epoch.
    """

    tokens: list[int]
    namespace: Namespace
    blocks: BlockRun
    committed: int
    found: int
    epochs: int
    left: int = 0

    @property
    def used(self) -> BlockRun:
        """The blocks that it still uses."""
        return self.blocks[self.left :]

    @property
    def known_block_count(self) -> int:
        """Blocks that there are, and whose tokens are known."""
        return min(len(self.tokens) // BLOCK_TOKENS, len(self.blocks))


class Tables:
    """All tables of a session. What nobody uses any more is released. What is of an ended epoch raises EpochEnded."""

    def __init__(self, pool: Pool, fence: Fence, tally: Callable[..., None]) -> None:
        self._pool = pool
        self._fence = fence
        self._tally = tally
        self._uses: Counter[tuple[int, int]] = Counter()
        self.all: list[Table] = []
        # Since somebody waits for blocks: what may have ended the hold of what he was granted.
        self.released: set[tuple[int, int]] = set()

    def add(self, tokens: list[int], namespace: Namespace, found: BlockRun, leased: BlockRun) -> Table | None:
        """Takes in what a request was given; None where its epoch has ended meanwhile."""
        blocks = BlockRun.join([found, leased])
        table = Table(tokens, namespace, blocks, len(found), len(found), self._fence.epochs)
        if not self._pool.own_blocks.has(blocks).all():
            if self._pool.link.standing.epochs == table.epochs:
                held = self._pool.own_blocks.has(blocks)
                raise WrongBytes(f"the client does not hold {[*blocks[~held]]} of what it was given, {[*blocks]}")
            return None
        self._uses.update(blocks)
        self.all.append(table)
        return table

    def extend(self, table: Table, leased: BlockRun) -> None:
        """Appends fresh blocks to a table."""
        self._uses.update(leased)
        table.blocks = BlockRun.join([table.blocks, leased])

    def drop(self, table: Table) -> None:
        """Ends a request."""
        self.all.remove(table)
        self._uses.subtract(table.used)
        self._release(table.used, table.epochs)

    def drop_first(self, table: Table, block_count: int) -> None:
        """Ends the use of so many of the first blocks, as a window does that slides; the others go on."""
        going, table.left = table.used[:block_count], table.left + block_count
        self._uses.subtract(going)
        self._release(going, table.epochs)

    def give_back(self, given: BlockRun) -> None:
        """Ends what was given for a request that does not begin."""
        self._release(given, self._fence.epochs)

    def drop_void(self) -> None:
        """Forgets what was of an epoch that has ended."""
        self.all = [table for table in self.all if table.epochs == self._fence.epochs]
        self._uses = Counter(block for table in self.all for block in table.used)

    def commit(self, *ends: tuple[Table, int]) -> None:
        """Writes tables of one epoch up to so many blocks, and publishes that; not awaited."""
        with self._fence.touching(ends[0][0].epochs):
            self._pool.blocks.commit([self._written(table, end) for table, end in ends])

    def sharing(self, blocks: BlockRun) -> list[Table]:
        """Returns the tables that use any of these."""
        return [table for table in self.all if blocks.among(table.used).any()]

    def alike(self, table: Table, block_count: int) -> list[Table]:
        """Returns the tables of the same contents up to so many blocks, this one among them."""
        end = block_count * BLOCK_TOKENS
        start = table.namespace, table.tokens[:end]
        return [one for one in self.all if (one.namespace, one.tokens[:end]) == start]

    def take_back(self, table: Table, before: BlockRun, leased: BlockRun) -> None:
        """Takes in that committed blocks are leased ones now, and spoils their bytes.

        Only `table` goes on with its own. Other tables that had some end, and what nobody uses is released.
        """
        for other in self.sharing(before):
            if other is not table:
                self.drop(other)
        self.released.update(before)
        fresh = dict(zip(before, leased, strict=True))
        used = [*table.used]
        first = next(place for place, block in enumerate(used) if block in fresh)
        if any(block not in fresh for block in used[first : table.committed - table.left]):
            raise WrongBytes(f"blocks behind those that were invalidated are still published: {used}, {fresh}")
        self._uses.subtract(before[before.among(table.used)])
        self._uses.update(leased[before.among(table.used)])
        table.blocks = BlockRun.join([table.blocks[: table.left], BlockRun.of(fresh.get(each, each) for each in used)])
        table.committed = table.left + first
        table.found = min(table.found, table.committed)
        self._spoil(table)
        self._release(leased, table.epochs)

    def verify(self, table: Table) -> int:
        """Compares every byte of its committed blocks; returns how many these are. Raises WrongBytes."""
        first, end = table.left * BLOCK_TOKENS, table.committed * BLOCK_TOKENS
        expected = stamps(table.tokens[:end], variant(table.namespace))[first:]
        with self._fence.touching(table.epochs):
            wrong = verify(self._pool, slots(table.blocks.block_ids, first, end), expected)
        if wrong is not None:
            raise WrongBytes(f"{asdict(wrong)} behind {first} tokens of {table}, {[*table.blocks]}")
        return table.committed - table.left

    def _written(self, table: Table, end: int) -> CommitChain:
        first = table.committed
        values = stamps(table.tokens[: end * BLOCK_TOKENS], variant(table.namespace))[first * BLOCK_TOKENS :]
        write(self._pool, slots(table.blocks.block_ids, first * BLOCK_TOKENS, end * BLOCK_TOKENS), values)
        table.committed = end
        self._tally(Count.ENGINE_COMMITTED_BLOCKS, end - first)
        return CommitChain(
            blocks=table.blocks[first:end],
            parent=table.blocks[max(0, first - 1) : first],
            namespace=table.namespace,
            **content(table.tokens, table.namespace, first, end),
        )

    def _spoil(self, table: Table) -> None:
        """Makes the bytes of blocks wrong that nobody may read now."""
        first, end = table.committed * BLOCK_TOKENS, len(table.blocks) * BLOCK_TOKENS
        with self._fence.touching(table.epochs):
            spoilt = np.full_like(stamps([0] * (end - first)), _SPOILT)
            write(self._pool, slots(table.blocks.block_ids, first, end), spoilt)

    def _release(self, blocks: BlockRun, epochs: int) -> None:
        """Releases those of them that nobody uses."""
        going = [block for block in blocks if self._uses[block] <= 0]
        for block in going:
            del self._uses[block]
        self.released.update(going)
        self._tally(Count.ENGINE_RELEASED_BLOCKS, len(going))
        with self._fence.touching(epochs):
            # Those at the end of a prompt are to be evicted first.
            self._pool.blocks.release(BlockRun.of(reversed(going)))


def content(tokens: list[int], namespace: Namespace, first: int, end: int) -> dict[str, Any]:
    """Returns what is in blocks [first, end), as a Chain or CommitChain is told."""
    if namespace.scheme:
        return {"keys": keys(tokens, namespace.version)[first * KEY_BYTES : end * KEY_BYTES]}
    return {"tokens": tokens[first * BLOCK_TOKENS : end * BLOCK_TOKENS]}
