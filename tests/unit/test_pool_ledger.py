"""Ledger: layout, limits, and what of it is touched."""

import hashlib
import mmap
import os
import random

import pytest
from calls import encode, prompt, span
from hypothesis import given
from hypothesis import strategies as st

from kvharbor.pool import Commit, ExtraKey, Ledger, Pool, PoolConfig, ledger_bytes
from kvharbor.pool.errors import InvalidField
from kvharbor.pool.ledger import MAX_SESSION, LedgerUnfit
from kvharbor.pool.steps import finish

CONFIG = PoolConfig(8, 4, identity=b"one")


def test_a_ledger_of_another_pool_is_refused() -> None:
    """Shape and identity are in the header: nothing is taken for a pool that it is not."""
    buffer = bytearray(ledger_bytes(CONFIG))
    Ledger.create(CONFIG, buffer)
    Ledger.open(CONFIG, buffer)
    for other in (PoolConfig(7, 4, identity=b"one"), PoolConfig(8, 3, identity=b"one"), PoolConfig(8, 4)):
        with pytest.raises(LedgerUnfit, match="another pool"):
            Ledger.open(other, buffer)
    with pytest.raises(LedgerUnfit, match="another pool"):
        Ledger.open(CONFIG, bytearray(ledger_bytes(CONFIG)))
    with pytest.raises(LedgerUnfit, match="bytes"):
        Ledger.open(CONFIG, buffer[:-1])


def test_a_closed_ledger_lets_go_of_its_buffer() -> None:
    """The mapping of a pool that is dropped can be closed."""
    with mmap.mmap(-1, ledger_bytes(CONFIG)) as buffer:
        ledger = Ledger.create(CONFIG, buffer)
        Pool(CONFIG, ledger)
        ledger.close()


def test_a_ledger_takes_memory_only_for_the_blocks_in_use() -> None:
    """A million blocks reserve addresses, not memory: what one prompt touches is some pages."""
    config = PoolConfig(1_000_000, 64)
    file = os.memfd_create("ledger")
    try:
        os.ftruncate(file, ledger_bytes(config))
        buffer = mmap.mmap(file, ledger_bytes(config))
        ledger = Ledger.create(config, buffer)
        pool = Pool(config, ledger)
        pool.open_session(1, "t")
        view = finish(pool.allocate(1, prompt(range(6400))))
        finish(pool.commit(1, view.number, Commit(6400)))
        assert os.fstat(file).st_blocks * 512 < 256 << 10
        ledger.close()
        buffer.close()
    finally:
        os.close(file)


@given(
    st.integers(1, 12),
    st.booleans(),
    st.lists(st.tuples(st.binary(min_size=48, max_size=48), st.sampled_from([0, 0, 0, 17, 20, 24, 40])), max_size=6),
    st.randoms(use_true_random=False),
)
def test_a_recorded_key_comes_back_as_it_was(
    block_tokens: int, is_opaque: bool, contents: list[tuple[bytes, int]], chance: random.Random
) -> None:
    """[L2] Tokens, with extra keys or without, and opaque keys have one column: whichever is shorter is padded."""
    config = PoolConfig(8, block_tokens)
    ledger = Ledger.create(config, bytearray(ledger_bytes(config)))
    blocks = chance.sample(range(8), len(contents)) if chance.random() < 0.5 else list(range(len(contents)))
    size = 8 + (32 if is_opaque else 4 * block_tokens)
    keys = [(seed * 2)[:size] + b"x" * (0 if is_opaque else extra_size) for seed, extra_size in contents]
    digests = [bytes([block]) * 32 for block in blocks]
    ledger.record(blocks, keys, digests, [1] * 8, 0, is_opaque)
    assert [ledger.key(block, [1] * 8, is_opaque) for block in blocks] == keys
    vouched = [hashlib.sha256(key).digest() for key in keys] if is_opaque else digests
    assert [ledger.checksum(block) for block in blocks] == vouched == list(ledger.checksums(keys, digests, is_opaque))


@pytest.mark.parametrize("session", [0, MAX_SESSION + 1])
def test_a_session_that_the_words_cannot_name_is_refused(session: int) -> None:
    """[L1] A word has 24 bits for the session; 0 means nobody."""
    pool = Pool(CONFIG)
    with pytest.raises(InvalidField, match="session is"):
        pool.open_session(session, "t")
    pool.open_session(MAX_SESSION, "t")
    finish(pool.allocate(MAX_SESSION, prompt(span(1, 6))))
    pool.check_invariants()


def test_a_full_heap_only_costs_hits_after_a_restart() -> None:
    """[L8] Contents that were not recorded are misses then, are counted, and nothing else breaks."""
    config = PoolConfig(8, 4)
    buffer = bytearray(ledger_bytes(config))
    ledger = Ledger.create(config, buffer)
    pool = Pool(config, ledger)
    pool.open_session(1, "t")
    keyed = prompt(span(1, 8), [ExtraKey(5, b"image")])
    room = ledger.cells._count
    view = finish(pool.allocate(1, keyed))
    finish(pool.commit(1, view.number, Commit(4)))
    ledger.cells._count = ledger.cells._touched  # full from here on
    finish(pool.commit(1, view.number, Commit(8)))
    finish(pool.release(1, view.number))
    pool.check_invariants()
    assert pool.stats().unrecorded_count == 1
    assert finish(pool.lookup("t", keyed)).present_tokens == 8
    ledger.cells._count = room

    after = Pool.recovered(config, Ledger.open(config, buffer), {}, first_number=2, first_revision=1)
    after.check_invariants()
    assert after.recovered_from is not None
    assert (after.recovered_from.torn_block_count, after.recovered_from.missed_block_count) == (0, 1)
    assert finish(after.lookup("t", keyed)).present_tokens == 4
    assert encode(span(1, 4)) == keyed.token_ids[:16]
