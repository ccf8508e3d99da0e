"""Block calls of workers whose engines keep their tables themselves: what they hold, and what they may read of it."""

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import replace

from calls import encode
from interleaving import FULL, Interleaving
from workers import Own, Reader, Stamp, Worker, extra_keys

from kvharbor.pool import Acquired, BlockRun, Chain, Commit, Committed, Invalidated, Shadow
from kvharbor.pool.errors import BlockHeld
from kvharbor.pool.steps import finish
from kvharbor.pool.writers import PATIENCE_S

SCHEMES = ["", "", "test/chained"]
NO_BLOCKS = BlockRun(array("I"), array("Q"))


def opaque_keys(prefix: tuple[int, ...], size: int) -> list[bytes]:
    """The chained keys of a prompt's blocks."""
    ends = range(size, len(prefix) + 1, size)
    return [hashlib.sha256(repr(prefix[:end]).encode()).digest() for end in ends]


def _begins_with(whole: Stamp, stamp: Stamp) -> bool:
    """Whether a block stands behind another, or for the same."""
    namespace, contents, extras = whole
    count = len(stamp[1])
    return (namespace, contents[:count], tuple(one for one in extras if one[0] < count)) == stamp


class Keeping(Interleaving):
    """Sessions that hold blocks by themselves too."""

    # What they say

    def chain(self, scheme: str, prefix: tuple[int, ...], first: int, extras: dict[int, bytes]) -> Chain:
        """The contents of the blocks from `first` on of a prompt's whole blocks, with extra keys by place in it."""
        size = self.block_tokens
        end = len(prefix) // size * size
        if scheme:
            return Chain(keys=b"".join(opaque_keys(prefix[:end], size)[first:]), scheme=scheme)
        own = {place - first * size: value for place, value in extras.items() if first * size <= place < end}
        return Chain(token_ids=encode(list(prefix[first * size : end])), extra_keys=extra_keys(own))

    def stamp(
        self, worker: Worker, scheme: str, prefix: tuple[int, ...], block: int, extras: dict[int, bytes]
    ) -> Stamp:
        """What block `block` of a prompt has to hold."""
        end = (block + 1) * self.block_tokens
        if scheme:
            keys = opaque_keys(prefix[:end], self.block_tokens)
            return ((worker.tenant, "", "", b"", scheme), tuple(keys), ())
        found = tuple(sorted((place, value) for place, value in extras.items() if place < end))
        return ((worker.tenant, "", "", b"", ""), tuple(prefix[:end]), found)

    def run(self, worker: Worker, blocks: Iterable[int]) -> BlockRun:
        blocks = list(blocks)
        return BlockRun(array("I", blocks), array("Q", [worker.own[block].generation for block in blocks]))

    def take(self, worker: Worker, run: BlockRun) -> None:
        for block, generation in zip(run.block_ids, run.generations, strict=True):
            assert self.pool._state.blocks.generation[block] == generation
            worker.own[block] = Own(generation)

    def know(self, own: Own, stamp: Stamp, prefix: tuple[int, ...], block: int, extras: dict[int, bytes]) -> None:
        """A block holds block `block` of a prompt."""
        end = (block + 1) * self.block_tokens
        own.stamp, own.prefix = stamp, prefix[:end]
        own.extras = {place: value for place, value in extras.items() if place < end}

    def leasing(self) -> list[Worker]:
        return [one for one in self.idle() if one.leased()]

    def keeping(self) -> list[Worker]:
        return [one for one in self.idle() if one.own]

    def reading(self) -> list[Worker]:
        return [one for one in self.idle() if one.own.keys() - one.leased()]

    # Calls

    def acquire(
        self,
        which: int,
        scheme: str,
        tokens: list[int],
        extras: dict[int, bytes],
        more: int,
        computes: bool,
        unless_pending: bool,
    ) -> None:
        worker = self.idle()[which % len(self.idle())]
        size, prefix = self.block_tokens, tuple(tokens)
        count = len(prefix) // size
        extras = {} if scheme else {place: value for place, value in extras.items() if place < count * size}

        def ended(found: Acquired) -> None:
            if found.stands_back:
                assert unless_pending, "[W8]"
                assert not len(found.held)
                assert not len(found.leased)
                assert found.pending is not None
                assert found.pending.idle_s < PATIENCE_S, "[W8]"
            elif more:
                assert len(found.held) + len(found.leased) == max(len(found.held), count + more - 1)
            else:
                assert not len(found.leased)
            assert found.pending is None or found.pending.session != worker.session, "[W4]"
            self.take(worker, found.held)
            self.take(worker, found.leased)
            for index, block in enumerate(found.held.block_ids):
                self.know(worker.own[block], self.stamp(worker, scheme, prefix, index, extras), prefix, index, extras)

        table = count + more - 1 if more else 0
        steps = self.pool.acquire(
            worker.session,
            self.chain(scheme, prefix, 0, extras),
            table,
            computes=computes,
            unless_pending=unless_pending,
        )
        self.begin(worker, steps, ended, FULL)

    def abandon(self, which: int, scheme: str, tokens: list[int], extras: dict[int, bytes]) -> None:
        """[B8] Of what it has acquired, perhaps."""
        worker = self.idle()[which % len(self.idle())]
        end = len(tokens) // self.block_tokens * self.block_tokens
        extras = {} if scheme else {place: value for place, value in extras.items() if place < end}
        self.begin(worker, self.pool.abandon(worker.session, self.chain(scheme, tuple(tokens), 0, extras)))

    def lease(self, which: int, least: int, more: int) -> None:
        worker = self.idle()[which % len(self.idle())]
        want = max(least + more, 1)

        def ended(run: BlockRun) -> None:
            assert least <= len(run) <= want
            self.take(worker, run)

        self.begin(worker, self.pool.lease(worker.session, least, want), ended, FULL)

    def commit_blocks(self, which: int, scheme: str, place: int, tokens: list[int], extras: dict[int, bytes]) -> None:
        """Writes leased blocks behind what the session holds, or from the root on, and publishes them."""
        worker = self.leasing()[which % len(self.leasing())]
        size = self.block_tokens
        namespace = (worker.tenant, "", "", b"", scheme)
        parents = [block for block, own in worker.own.items() if own.stamp is not None and own.stamp[0] == namespace]
        parent = ([None, None, *parents])[place % (len(parents) + 2)]
        before = () if parent is None else worker.own[parent].prefix
        known = {} if parent is None else dict(worker.own[parent].extras)
        leased = worker.leased()
        count = min(len(tokens) // size, len(leased))
        if not count:
            return
        prefix = before + tuple(tokens[: count * size])
        first = len(before) // size
        new = {} if scheme else {len(before) + at: value for at, value in extras.items() if at < count * size}
        extras = known | new
        blocks = leased[:count]
        stamps = [self.stamp(worker, scheme, prefix, first + index, extras) for index in range(count)]
        for block, stamp in zip(blocks, stamps, strict=True):
            self.harbour.memory[block] = stamp
        call = (
            worker.session,
            NO_BLOCKS if parent is None else self.run(worker, [parent]),
            self.run(worker, blocks),
            self.chain(scheme, prefix, first, extras),
        )

        def ended(shadows: tuple[Shadow, ...]) -> None:
            for index, block in enumerate(blocks):
                self.know(worker.own[block], stamps[index], prefix, first + index, extras)
            for shadow in shadows:
                assert self.pool._state.blocks.generation[shadow.block_id] == shadow.generation
                worker.own[blocks[shadow.position]].canonical = shadow.block_id
            revision = self.pool.revision
            assert finish(self.pool.commit_blocks(*call)) == shadows, "a repeated commit is another"
            assert self.pool.revision == revision

        self.begin(worker, self.pool.commit_blocks(*call), ended)

    def release_blocks(self, which: int, places: list[int], is_stale: bool) -> None:
        worker = self.keeping()[which % len(self.keeping())]
        blocks = list(dict.fromkeys(list(worker.own)[place % len(worker.own)] for place in places))
        run = self.run(worker, blocks)
        if is_stale:
            stale = BlockRun(run.block_ids, array("Q", [age - 1 for age in run.generations]))
            self.begin(worker, self.pool.release_blocks(worker.session, stale), lambda count: self.expect(count, 0))
            return
        for block in blocks:
            del worker.own[block]

        def ended(count: int) -> None:
            self.expect(count, len(blocks))
            self.expect(finish(self.pool.release_blocks(worker.session, run)), 0)

        self.begin(worker, self.pool.release_blocks(worker.session, run), ended)

    def expect(self, count: int, expected: int) -> None:
        assert count == expected

    def invalidate(self, which: int, place: int) -> None:
        worker = self.reading()[which % len(self.reading())]
        committed = [block for block, own in worker.own.items() if own.stamp is not None and own.canonical is None]
        if not committed:
            return
        block = committed[place % len(committed)]
        stamp = worker.own[block].stamp
        assert stamp is not None
        touched = {
            other for other, own in worker.own.items() if own.stamp is not None and _begins_with(own.stamp, stamp)
        }
        worker.uncertain = touched

        def ended(done: Invalidated) -> None:
            worker.uncertain = set()
            before = dict(zip(done.before.block_ids, done.before.generations, strict=True))
            assert touched <= before.keys()
            assert [age + 1 for age in done.before.generations] == list(done.leased.generations)
            self.take(worker, done.leased)

        steps = self.pool.invalidate(worker.session, block, worker.own[block].generation)
        self.begin(worker, steps, ended, (BlockHeld,))
        if worker.running is None:
            worker.uncertain = set()

    def appending(self) -> list[tuple[Worker, Reader]]:
        return [(one, reader) for one, reader in self.callable() if one.leased() and not one.is_copying(reader)]

    def append(self, which: int, count: int, new: list[int], keep: int) -> None:
        """Commits what a sequence has computed, into leased blocks too."""
        worker, reader = self.appending()[which % len(self.appending())]
        blocks = worker.leased()[:count]
        appended = self.run(worker, blocks)
        for block in blocks:
            del worker.own[block]
        reader.table += blocks
        asked = replace(self.compute(reader, new, {}, keep=keep, names_blocks=False), appended=appended)

        def ended(done: Committed) -> None:
            self.take_shadows(reader, done)
            again = Commit(reader.computed, appended=appended)
            self.take_shadows(reader, finish(self.pool.commit(worker.session, reader.number, again)))

        self.begin(worker, self.pool.commit(worker.session, reader.number, asked), ended)
