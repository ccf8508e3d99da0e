"""Each rule of the ledger's protocol broken in turn: the checker of `tests/model` has to notice.

The comparison of ledger and memory is off here: what a kill shows has to be enough.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from actions import config
from killing import Killing, Successor, walk

from kvharbor.pool import invariants, publication
from kvharbor.pool.blocks import FREE, Blocks
from kvharbor.pool.errors import PoolError
from kvharbor.pool.ledger import Ledger
from kvharbor.pool.records import Records

SCHEMES = ["", "test/sha256"]


def word_before_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """[L2] The record is stored after the word that vouches for it."""
    late: list[tuple[Any, ...]] = []
    record = publication._record

    def after(transition: Callable[..., None]) -> Callable[..., None]:
        def changed(self: Blocks, *arguments: Any) -> None:
            transition(self, *arguments)
            while late:
                record(*late.pop())

        return changed

    monkeypatch.setattr(publication, "_record", lambda *arguments: late.append(arguments))
    monkeypatch.setattr(Blocks, "commit", after(Blocks.commit))
    monkeypatch.setattr(Blocks, "shadow", after(Blocks.shadow))


def generation_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """[L6] A block is free again under the generation that it had."""

    def release_private(self: Blocks, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.state[block] = FREE
        self.free.give(blocks)
        self.ledger.mark(blocks, self.generation, FREE)
        self.ledger.records.erase(blocks)

    def reserve_evicted(self: Blocks, victims: Sequence[int], after: int | None, session: int) -> list[int]:
        self.free.give(victims)
        return self.reserve(self.free.count, after, session)

    monkeypatch.setattr(Blocks, "release_private", release_private)
    monkeypatch.setattr(Blocks, "reserve_evicted", reserve_evicted)


def held_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """[L3] The reply leaves before the word says that the block is held."""
    monkeypatch.setattr(Blocks, "_revive", lambda self, blocks: self.evictable.revive_many(blocks))


def stamp_behind_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """[L3] The stamp of a release is stored after the word."""

    def mark_released(self: Ledger, blocks: Sequence[int], low_bits: int) -> None:
        for block in blocks:
            self.low_bytes[block] = low_bits
            self.stamps[block] = self.next_stamp
            self.next_stamp += 1

    monkeypatch.setattr(Ledger, "mark_released", mark_released)


def owner_not_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """[L5] An adopted sequence's words go on naming the session that it came from."""
    monkeypatch.setattr(Blocks, "give_to", lambda *_: None)


MUTANTS = [word_before_record, generation_not_raised, held_not_set, stamp_behind_word, owner_not_rewritten]


@pytest.mark.slow
@pytest.mark.parametrize("break_rule", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_broken_rule_is_noticed(break_rule: Callable[[pytest.MonkeyPatch], None], monkeypatch: Any) -> None:
    """A walk that the pool takes without a complaint fails once a rule is broken."""
    monkeypatch.setattr(invariants, "check_ledger", lambda *_: None)
    break_rule(monkeypatch)
    with pytest.raises((AssertionError, PoolError)):
        _walk_all()


def _walk_all() -> None:
    _hand_over()
    for seed in range(20):
        walk(seed, steps=60)


def _hand_over() -> None:
    """A sequence with reserved blocks changes hands, and the process is killed after the next step."""
    world = Killing(config(12, 512, 0))
    world.allocate(0, [1, 2, 1, 1, 1], {}, 4, None, b"", "", "")
    world.handoff(0, [], 0, 1)
    world.adopt(1, "")
    world.extend(0, 7)
    world.check_kills()


def scribbled(scheme: str) -> list[tuple[Killing, Successor]]:
    """A pool with two committed blocks, recovered with each byte of its records scribbled in turn."""
    world = Killing(config(12, 2, 0))
    if scheme:
        world.lease(0, 2, 0)
        world.commit_blocks(0, scheme, 0, [1, 2, 1, 1], {})
        world.release_blocks(0, [1, 0], is_stale=False)
    else:
        world.publish(0, [1, 2, 1, 1], 0, releases=True)
    records, image = world.pool._state.ledger.records, bytes(world.buffer)
    first, second = sorted(world.pool._state.blocks.evictable)
    found = []
    for column in (records._contents, records._digests, records.ages, records.parents, records.parent_ages):
        size = len(column) * column._step // len(world.pool._state.blocks.state)  # type: ignore[attr-defined]
        used = records.block_bytes if column is records._contents and not scheme else size
        for block in (first, second):
            for byte in range(used):
                torn = bytearray(image)
                torn[column._offset + block * size + byte] ^= 1  # type: ignore[attr-defined]
                found.append((world, Successor(world.config, torn, {}, dict(world.harbour.memory))))
    return found


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_scribbled_record_is_a_miss(scheme: str) -> None:
    """[G1] [L2] Whatever is wrong with a record, its block and those below it are not found any more."""
    for world, successor in scribbled(scheme):
        successor.check_bytes(world.harbour.published)
        successor.pool.check_invariants()
        assert successor.pool.recovered_from is not None
        assert successor.pool.recovered_from.missed_block_count in (1, 2)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_record_without_a_checksum_is_noticed(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """[L2] If nothing vouched for it, a scribbled record would be a hit on other bytes."""
    monkeypatch.setattr(Records, "vouched_count", lambda *given, **_: len(given[1]))
    with pytest.raises(AssertionError, match=r"\[G1\]"):
        _check_all_bytes(scribbled(scheme))


def _check_all_bytes(found: list[tuple[Killing, Successor]]) -> None:
    for world, successor in found:
        successor.check_bytes(world.harbour.published)
