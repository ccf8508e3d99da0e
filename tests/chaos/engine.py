"""What an engine does that keeps its block tables itself: at random all that block calls can do.

It verifies every byte of what it holds. What fails for want of room or of the service leaves it with what the client
says that it holds.
"""

import contextlib
import functools
import random
from collections import deque
from collections.abc import Callable

import grpc

from chaos.agreement import unheld
from chaos.board import Count
from chaos.decode import Decoder
from chaos.held import Fence, WrongBytes
from chaos.load import Given, Tally, Tell
from chaos.spare import Spare
from chaos.stamps import BLOCK_TOKENS
from chaos.tables import Table, Tables, content
from chaos.universe import SCHEMES, VERSIONS, next_block, whole_blocks
from chaos.waits import Asked, Waits
from kvharbor.client import (
    Acquired,
    BlockHeld,
    BlockNotHeld,
    BlockRun,
    Chain,
    EpochEnded,
    Full,
    HarborError,
    Namespace,
    Pool,
    SequenceLost,
    Unavailable,
)

_MOST_TABLES = 3
_MOST_BLOCKS = 8
_MOST_WAITING = 2
_SPARE_BLOCKS = 2
_WAIT_S = 0.2


class Engine:
    """One session's requests. `tally` counts what is done, `tell` has what was lost."""

    def __init__(self, pool: Pool, fence: Fence, chance: random.Random, tally: Tally, tell: Tell) -> None:
        self._pool = pool
        self._fence = fence
        self._chance = chance
        self._tally = tally
        self._tell = tell
        self._tables = Tables(pool, fence, tally)
        self._waits = Waits(self._tables, tally, self._take)
        self._spare = Spare(pool, fence, tally)
        self._decoder = Decoder(pool, fence, chance, tally, tell)
        self._life = pool.link.standing.life
        # Blocks of which only the service knows whether they were taken back.
        self._doubtful: set[str] = set()
        self._refusals: deque[HarborError] = deque()
        pool.blocks.on_refusal = self._refusals.append

    def act(self) -> None:
        """Does one thing. Raises WrongBytes, SessionGone, Unavailable."""
        self._tally(Count.ENGINE_ACTS)
        self._judge_refusals()
        if self._pool.link.standing.life != self._life:
            self._life = self._pool.link.standing.life
            self._yielding(self._verify_resumed)
        self._yielding(self._waits.poll)
        room = len(self._tables.all) < _MOST_TABLES
        if not self._tables.all or (room and self._chance.random() < 0.3):
            self._yielding(self._admit)
            return
        alone: tuple[Callable[[], object], ...] = (
            self._decoder.act,
            lambda: self._spare.fill(_SPARE_BLOCKS),
            self._bump,
            self._replace_stream,
            self._waits.cancel,
            self._compare_holdings,
        )
        if self._chance.random() < 0.4:
            self._yielding(self._chance.choices(alone, (20, 3, 1, 1, 1, 1))[0])
            return
        table = self._chance.choice(self._tables.all)
        actions = (self._compute, self._grow, self._slide, self._invalidate, self._end)
        chosen = self._chance.choices(actions, (8, 5, 2, 2, 4))[0]
        self._yielding(lambda: chosen(table))

    def adopt(self, given: Given) -> None:
        """Leaves a sequence that was handed off to its end."""

    def settle(self) -> None:
        """Waits for nothing any more, and for all that was sent."""
        self._waits.cancel()
        self._yielding(self._waits.poll)
        # What an answer gives that nobody wants any more is released by a call of its own.
        for _ in range(2):
            self._yielding(self._flush)
        self._judge_refusals()

    def verify_all(self) -> None:
        """Verifies everything that is held."""
        for table in [*self._tables.all]:
            self._yielding(functools.partial(self._verify, table))
        self._yielding(self._decoder.verify_all)

    def release_all(self) -> None:
        """Verifies and releases all."""
        self.verify_all()
        self.settle()
        self._yielding(self._decoder.release_all)
        self._yielding(self._spare.release)
        while self._tables.all:
            self._yielding(lambda: self._tables.drop(self._tables.all[-1]))
        self.settle()
        if held := [*self._pool.own_blocks.all()]:
            self._tell("failed", text=f"the client has {held} still as held, and no table of its engine has them")

    def _flush(self) -> None:
        while True:
            with contextlib.suppress(Unavailable):
                self._pool.blocks.flush()
                return

    def _yielding(self, action: Callable[[], object]) -> None:
        """Lets one request go where there is no room."""
        try:
            action()
        except Full:
            self._tally(Count.REFUSALS)
            if self._tables.all:
                self._yielding(lambda: self._tables.drop(self._chance.choice(self._tables.all)))
        except (SequenceLost, EpochEnded) as ended:
            self._tables.drop_void()
            self._decoder.drop_ended(ended)

    def _verify_resumed(self) -> None:
        block_count = sum(map(self._verify, [*self._tables.all])) + self._decoder.verify_all()
        self._tally(Count.ENGINE_RESUMED_BLOCKS_VERIFIED, block_count)

    def _admit(self) -> None:
        asked = [self._asked() for _ in range(self._chance.randint(1, 2))]
        chains = [self._chain(*one) for one in asked]
        waits = len(self._waits) < _MOST_WAITING and self._chance.random() < 0.5
        results = self._pool.blocks.acquire(chains, wait_s=_WAIT_S if waits else 0.0)
        self._tally(Count.ENGINE_ACQUIRES)
        refused: HarborError | None = None
        for one, result in zip(asked, results, strict=True):
            if result.grant is not None:
                self._waits.add(result.grant, one)
            elif result.refusal is not None:
                refused = result.refusal
            else:
                self._take(one, result)
        if refused is not None:
            raise refused

    def _asked(self) -> Asked:
        namespace = Namespace(version=self._pool.blocks.version, scheme=self._chance.choice(SCHEMES))
        return whole_blocks(self._chance), namespace

    def _chain(self, tokens: list[int], namespace: Namespace) -> Chain:
        block_count = len(tokens) // BLOCK_TOKENS
        return Chain(
            namespace=namespace,
            # For some it leases one ahead, about some it only asks.
            table_block_count=self._chance.choice((block_count, block_count, block_count + 1, 0)),
            computes=self._chance.random() < 0.5,
            unless_pending=self._chance.random() < 0.5,
            **content(tokens, namespace, 0, block_count),
        )

    def _take(self, asked: Asked, given: Acquired) -> None:
        self._tally(Count.ENGINE_PENDING_SEEN, given.pending is not None)
        if given.stands_back:
            self._tally(Count.ENGINE_STOOD_BACK)
            return
        self._tally(Count.ENGINE_LEASED_BLOCKS, len(given.leased))
        table = self._tables.add(*asked, given.held, given.leased)
        if table is not None:
            self._tally(Count.ENGINE_HITS_VERIFIED, bool(self._verify(table)))

    def _compute(self, table: Table) -> None:
        """Commits some of it, and perhaps of another one, without waiting for that."""
        ends = []
        for one in {id(table): table, id(other := self._chance.choice(self._tables.all)): other}.values():
            if self._goes_on(one) and one.committed < one.known_block_count and one.epochs == table.epochs:
                ends.append((one, self._chance.randint(one.committed + 1, one.known_block_count)))
        if ends:
            self._tables.commit(*ends)

    def _goes_on(self, table: Table) -> bool:
        """Whether its namespace can still be named: the empty version is the session's."""
        return table.namespace.version == self._pool.blocks.version or bool(table.namespace.version)

    def _grow(self, table: Table) -> None:
        """Takes in a block of new tokens, of spare blocks or leased for it."""
        if table.known_block_count == len(table.blocks) and len(table.blocks) < _MOST_BLOCKS:
            blocks = self._spare.take(1)
            if not len(blocks):
                blocks = self._pool.blocks.lease(1, 2, growth=True).blocks
            self._tally(Count.ENGINE_LEASED_BLOCKS, len(blocks))
            self._tables.extend(table, blocks)
        if table.known_block_count < len(table.blocks):
            table.tokens = [*table.tokens, *next_block(self._chance)]
        self._compute(table)
        self._verify(table)

    def _slide(self, table: Table) -> None:
        """Uses its first blocks no more."""
        if table.committed - table.left > 1:
            self._tables.drop_first(table, self._chance.randint(1, table.committed - table.left - 1))
        self._verify(table)

    def _invalidate(self, table: Table) -> None:
        """Takes back what it has published from some block on, if nobody else holds it."""
        # The one before stays to be the parent.
        places = range(table.left + bool(table.left), table.committed)
        if not places:
            return
        place = self._chance.choice(places)
        named = table.blocks[place : place + 1]
        try:
            outcome = self._pool.blocks.invalidate(named)
        except Unavailable:
            self._forget_alike(table, place)
            raise
        (refusal,) = outcome.refusals
        if refusal is None:
            self._tally(Count.ENGINE_INVALIDATED_BLOCKS, len(outcome.before))
            self._tables.take_back(table, outcome.before, outcome.leased)
        elif isinstance(refusal, BlockHeld) or (isinstance(refusal, BlockNotHeld) and place >= table.found):
            # A block of its own may be a shadow, which is no published block.
            self._tally(Count.ENGINE_INVALIDATIONS_REFUSED)
        else:
            raise refusal

    def _forget_alike(self, invalidated: Table, place: int) -> None:
        """Ends all that may have lost blocks to a call without an answer: what begins alike, and what has waited.

        Others' blocks need not be the named one: they may be shadows of it, or behind it in a table that has let go it.
        """
        self._waits.cancel()
        self._tables.released.update(self._pool.own_blocks.all())
        self._doubt(self._waits.poll())
        for table in self._tables.alike(invalidated, place + 1):
            self._doubt(table.used)
            self._tables.drop(table)

    def _doubt(self, blocks: BlockRun) -> None:
        self._doubtful.update(f"{block}/{generation}" for block, generation in blocks)

    def _compare_holdings(self) -> None:
        """Looks whether the service has all that the client says is held, before a wrong byte tells."""
        self._flush()
        missing = [block for block in unheld(self._pool) if "{}/{}".format(*block) not in self._doubtful]
        if missing:
            raise WrongBytes(f"the client says that it holds {missing}, and the service does not")
        self._tally(Count.ENGINE_HOLDINGS_COMPARED)

    def _end(self, table: Table) -> None:
        self._verify(table)
        self._tables.drop(table)

    def _bump(self) -> None:
        self._pool.blocks.bump_namespace(self._chance.choice(("", *VERSIONS)))
        self._tally(Count.ENGINE_BUMPS)

    def _replace_stream(self) -> None:
        """Opens another stream of the session in the midst of calls, which says nothing."""
        second = self._pool.link.converse(iter(()))
        self._tally(Count.ENGINE_STREAMS_REPLACED)
        try:
            if self._chance.random() < 0.7:
                self._admit()
            else:
                self._invalidate(self._chance.choice(self._tables.all))
        finally:
            with contextlib.suppress(grpc.RpcError):
                for _ in second:
                    pass

    def _verify(self, table: Table) -> int:
        block_count = self._tables.verify(table)
        self._tally(Count.ENGINE_BLOCKS_VERIFIED, block_count)
        self._tally(Count.ENGINE_OPAQUE_BLOCKS_VERIFIED, block_count if table.namespace.scheme else 0)
        return block_count

    def _judge_refusals(self) -> None:
        """Tells of blocks that the session does not hold any more, or of a commit that was not taken.

        Once the act that they came in is over: by then it is known what was in doubt.
        """
        while self._refusals:
            error = self._refusals.popleft()
            named = _named(error)
            if not named or not self._doubtful.issuperset(named):
                self._tally(Count.LOST_BLOCKS, len(named))
                self._tell("lost", text=f"{error!r} {dict(error.metadata)}")


def _named(refusal: HarborError) -> list[str]:
    """Returns the blocks that a refusal names, as block/generation."""
    told = refusal.metadata
    if "blockId" in told:
        return [f"{told['blockId']}/{told['generation']}"]
    return [*filter(None, told.get("blocks", "").split(", "))]
