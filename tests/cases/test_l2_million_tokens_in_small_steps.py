"""L2: each step costs what is new in it, however long the sequence has become. Loose limits and ratios."""

import time
from array import array

import pytest

from kvharbor.client import connect
from kvharbor.gpumem import DataType, Layout
from kvharbor.pool import POLICIES, Commit, Pool, PoolConfig, Prompt
from kvharbor.pool.steps import finish

pytestmark = pytest.mark.slow

TOKENS, STEP, BLOCK_TOKENS = 1 << 20, 512, 16
IDS = array("I", range(TOKENS)).tobytes()


def new_pool(policy: str = "auto") -> Pool:
    pool = Pool(PoolConfig(1 << 17, BLOCK_TOKENS, policy=policy, history=True))
    pool.open_session(1, "t")
    return pool


def last_digest(pool: Pool) -> bytes:
    (chain,) = pool.index_chains()
    return chain.digests[-1]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_long_sequence_grows_as_fast_as_a_short_one(policy: str) -> None:
    """L2: 2,048 steps of Extend and Commit: the last are at most twice as slow, and the digests those of one call."""
    pool = new_pool(policy)
    view = finish(pool.allocate(1, Prompt(IDS[: 4 * STEP])))
    finish(pool.commit(1, view.number, Commit(STEP)))
    took = []
    for known in range(STEP, TOKENS, STEP):
        began = time.thread_time()
        finish(pool.extend(1, view.number, known + STEP))
        finish(pool.commit(1, view.number, Commit(known + STEP, IDS[4 * known : 4 * (known + STEP)])))
        took.append(time.thread_time() - began)
        pool.drain_events()
    first, last = sorted(took[:128])[64], sorted(took[-128:])[64]
    assert sum(took) <= 5.0
    assert last <= 2 * first

    whole = new_pool()
    at_once = finish(whole.allocate(1, Prompt(IDS)))
    finish(whole.commit(1, at_once.number, Commit(TOKENS)))
    assert last_digest(whole) == last_digest(pool)


def test_a_lookup_stops_at_the_first_miss() -> None:
    """L2: a cold Lookup of 2^20 tokens takes at most 100 ms, and one with only the first block there finds 16."""
    pool = new_pool()
    view = finish(pool.allocate(1, Prompt(IDS[:64])))
    finish(pool.commit(1, view.number, Commit(16)))
    fresh = array("I", range(7, TOKENS + 7)).tobytes()
    taken = []
    for _ in range(3):
        began = time.thread_time()
        cold = finish(pool.lookup("t", Prompt(fresh)))
        partial = finish(pool.lookup("t", Prompt(IDS)))
        taken.append(time.thread_time() - began)
    assert min(taken) <= 0.2
    assert (cold.present_tokens, partial.present_tokens) == (0, 16)


def test_a_lookup_over_the_wire_stops_there_too(harbor: str) -> None:
    """L2: message, parsing and reply of 2^20 tokens included, a cold or partial Lookup takes at most 100 ms."""
    layout = Layout.attention("l2", layers=1, kv_heads=1, head_dim=2, data_type=DataType.FLOAT16, block_tokens=16)
    fresh = array("I", range(7, TOKENS + 7)).tobytes()
    with connect(harbor) as connection:
        pool = connection.open_pool("l2", layout, 8 * layout.block_bytes)
        with pool.allocate(IDS[:64]) as sequence:
            sequence.commit(16)
        taken = []
        for prompt, expected in [(fresh, 0), (IDS, 16)] * 4:
            began = time.perf_counter()
            assert pool.lookup(prompt).present_tokens == expected
            taken.append(time.perf_counter() - began)
    assert min(taken[::2]) <= 0.1
    assert min(taken[1::2]) <= 0.1
