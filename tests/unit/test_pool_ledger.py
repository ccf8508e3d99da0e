"""Ledger: layout, limits, and what of it is touched."""

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
    st.lists(st.tuples(st.binary(min_size=48, max_size=48), st.sampled_from([0, 17, 20, 40])), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
def test_a_record_comes_back_as_it_was(
    block_tokens: int, is_opaque: bool, contents: list[tuple[bytes, int]], chance: random.Random
) -> None:
    """[L2] Tokens, with extra keys or without, and opaque keys, of any run of blocks and in the next process too."""
    config = PoolConfig(8, block_tokens)
    buffer = bytearray(ledger_bytes(config))
    records = Ledger.create(config, buffer).records
    blocks = chance.sample(range(8), len(contents)) if chance.random() < 0.5 else list(range(len(contents)))
    size = records.content_bytes(is_opaque=is_opaque)
    chain = [(seed * 2)[:size] + b"x" * (0 if is_opaque else extra_size) for seed, extra_size in contents]
    digests = chain if is_opaque else [bytes([block]) * 32 for block in blocks]
    generation = [block + 1 for block in range(8)]
    records.write(blocks, 1 << 40, chain, digests, generation, 0, is_opaque=is_opaque)
    after = Ledger.open(config, buffer).records
    after.take_up_extras()
    for found in (records, after):
        assert [found.recorded(block, generation, is_opaque=is_opaque) for block in blocks] == chain
        assert (found.all_recorded(blocks, is_opaque=is_opaque), found.digests(blocks)) == (chain, digests)
        assert [found.content(block, is_opaque=is_opaque) for block in blocks] == [one[:size] for one in chain]
        assert [found.parents[block] for block in blocks] == [1 << 40, *blocks][: len(blocks)]
        assert [found.parent_ages[block] for block in blocks] == [0, *[block + 1 for block in blocks]][: len(blocks)]
        assert found.not_whole(range(8), generation) == sorted(set(range(8)).difference(blocks))
        assert found.recorded(blocks[0], [0] * 8, is_opaque=is_opaque) is None
        assert found.vouched_count(blocks, 1 << 40, chain, digests, is_opaque=is_opaque) == len(blocks)


@given(st.integers(1, 12), st.booleans(), st.integers(1, 70), st.sampled_from([1, 2]), st.data())
def test_what_chains_have_in_common_ends_at_the_first_other_content(
    block_tokens: int, is_opaque: bool, count: int, step: int, data: st.DataObject
) -> None:
    """[G1] Whichever block it is, and whichever byte of it."""
    config = PoolConfig(140, block_tokens)
    records = Ledger.create(config, bytearray(ledger_bytes(config))).records
    blocks = list(range(0, step * count, step))
    size = records.content_bytes(is_opaque=is_opaque)
    chain = [bytes([place]) * size for place in range(count)]
    digests = chain if is_opaque else [bytes(32)] * count
    records.write(blocks, 1 << 40, chain, digests, [1] * 140, 0, is_opaque=is_opaque)
    joined = b"".join(chain)
    assert records.common_count(blocks, joined, is_opaque=is_opaque) == count
    at = data.draw(st.integers(0, len(joined) - 1))
    other = joined[:at] + bytes([joined[at] ^ 1]) + joined[at + 1 :]
    assert records.common_count(blocks, other, is_opaque=is_opaque) == at // size


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
