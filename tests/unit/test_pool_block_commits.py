"""CommitBlocks: leased blocks of a session become what others may read. Rule [B3]."""

from array import array

import pytest
from block_calls import NONE, acquire, backwards, commit, keys, lease, part, publish, release, tokens
from calls import classes, encode, new_pool, span

from kvharbor.pool import BlockRun, Chain, ExtraKey, Shadow
from kvharbor.pool.errors import (
    BlockNotHeld,
    InvalidField,
    PoolError,
)
from kvharbor.pool.steps import finish


def test_a_commit_of_published_content_is_a_shadow() -> None:
    """[P7] The own copy stays, unindexed, and the canonical block is held as long; as a parent it is that one."""
    pool = new_pool(16)
    first = publish(pool, keys("ab"), 2)
    second = lease(pool, 3, session=2)
    assert commit(pool, second, keys("abc"), session=2) == [
        Shadow(0, first.block_ids[0], 1),
        Shadow(1, first.block_ids[1], 1),
    ]
    release(pool, first)
    assert classes(pool.stats()) == {"free": 11, "active": 5}
    behind = lease(pool, 1, session=2)
    assert commit(pool, behind, keys("x", "ab"), part(second, 1, 2), session=2) == []
    assert acquire(pool, keys("abx")).held.block_ids == array("I", [*first.block_ids, *behind.block_ids])
    release(pool, acquire(pool, keys("abx")).held)
    pool.check_invariants()
    assert release(pool, part(second, 0, 2), session=2) == 2
    pool.check_invariants()
    assert classes(pool.stats()) == {"free": 12, "active": 4}
    assert release(pool, BlockRun(second.block_ids[2:] + behind.block_ids, array("Q", [1, 1])), session=2) == 2
    assert classes(pool.stats()) == {"free": 12, "cached": 4}
    pool.check_invariants()


def test_a_shadow_holds_its_canonical_block_until_it_is_released() -> None:
    """[P7] [B2] And all before it."""
    pool = new_pool(8)
    first = publish(pool, keys("abc"), 3)
    own = lease(pool, 1, session=2)
    held = acquire(pool, keys("ab"), session=2).held
    commit(pool, own, keys("c", "ab"), part(held, 1), session=2)
    release(pool, held, session=2)
    release(pool, backwards(first))
    assert classes(pool.stats()) == {"free": 4, "active": 4}
    assert finish(pool.evict_unheld()) == 0
    release(pool, own, session=2)
    assert classes(pool.stats()) == {"free": 5, "cached": 3}
    pool.check_invariants()


def test_a_repeated_commit_changes_nothing() -> None:
    """[G4] It tells the shadows again, and goes on behind what is committed already."""
    pool = new_pool(16)
    publish(pool, keys("a"), 1)
    own = lease(pool, 4, session=2)
    assert [one.position for one in commit(pool, part(own, 0, 3), keys("abc"), session=2)] == [0]
    before = pool.stats()
    assert [one.position for one in commit(pool, part(own, 0, 3), keys("abc"), session=2)] == [0]
    assert pool.stats() == before
    assert [one.position for one in commit(pool, own, keys("abcd"), session=2)] == [0]
    assert len(acquire(pool, keys("abcd")).held) == 4
    pool.check_invariants()


def test_a_commit_needs_leased_blocks_and_a_held_parent() -> None:
    """[P1] [B3] Nothing of a chain is committed otherwise."""
    pool = new_pool(16)
    theirs = publish(pool, keys("abc"), 3)
    own = lease(pool, 2, session=2)
    committed = publish(pool, keys("xy"), 2, session=2)
    stale = BlockRun(own.block_ids, array("Q", [1, 2]))
    twice = BlockRun(own.block_ids[:1] * 2, own.generations[:1] * 2)
    unknown = BlockRun(array("I", [own.block_ids[0], 4_000_000_000]), array("Q", [1, 1]))
    for parent, blocks in (
        (part(theirs, 2), own),
        (own, own),
        (BlockRun(committed.block_ids[1:], array("Q", [2])), own),
        (NONE, stale),
        (NONE, twice),
        (NONE, unknown),
        (NONE, BlockRun(own.block_ids[:1] + theirs.block_ids[:1], array("Q", [1, 1]))),
        (NONE, committed),
        (part(committed, 0, 1), committed),
    ):
        before = pool.stats()
        with pytest.raises((BlockNotHeld, InvalidField)):
            commit(pool, blocks, keys("de", "abc"), part(parent, 0, 1) if len(parent) else NONE, session=2)
        assert pool.stats() == before
        pool.check_invariants()
    assert len(acquire(pool, keys("abcde")).held) == 3


@pytest.mark.parametrize(
    "chain",
    [
        Chain(token_ids=encode(span(1, 4)), scheme="s"),
        Chain(keys=bytes(32)),
        Chain(keys=bytes(31), scheme="s"),
        Chain(token_ids=encode(span(1, 3))),
        Chain(token_ids=b"123"),
        Chain(keys=bytes(32), extra_keys=(ExtraKey(0, b"x"),), scheme="s"),
        Chain(token_ids=encode(span(1, 4)), extra_keys=(ExtraKey(4, b"x"),)),
        Chain(token_ids=encode(span(1, 8))),
    ],
)
def test_a_chain_is_whole_blocks_told_in_the_way_of_its_namespace(chain: Chain) -> None:
    pool = new_pool(8)
    own = lease(pool, 1)
    with pytest.raises(InvalidField):
        commit(pool, own, chain)
    pool.check_invariants()
    assert classes(pool.stats()) == {"free": 7, "reserved": 1}


def test_a_parent_is_of_the_chains_namespace() -> None:
    """[G1] Keys behind tokens would mean nothing."""
    pool = new_pool(8)
    first = publish(pool, tokens(span(1, 4)), 1)
    with pytest.raises(InvalidField, match="parent"):
        commit(pool, lease(pool, 1), keys("b", "a"), first)


def test_every_refusal_has_its_reason() -> None:
    with pytest.raises(PoolError) as refused:
        commit(new_pool(8), BlockRun(array("I", [3]), array("Q", [9])), keys("a"))
    assert refused.value.reason == "BLOCK_NOT_HELD"
    assert refused.value.metadata().keys() == {"blockId", "generation", "remedy"}
