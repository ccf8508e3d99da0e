"""No step is long, whatever a caller asks for: lists are bounded, and what is many is cut in slices."""

import time
from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from kvharbor.pool import Commit, ExtraKey, Pool, PoolConfig, Prompt, validate
from kvharbor.pool.errors import InvalidField
from kvharbor.pool.steps import Steps, finish
from kvharbor.pool.tree import extras_by_block

BLOCK_TOKENS = 16


def new_pool(block_count: int) -> Pool:
    """Returns a pool with session 1."""
    pool = Pool(PoolConfig(block_count, BLOCK_TOKENS))
    pool.open_session(1, "t")
    return pool


def prompt(*tokens: int) -> Prompt:
    """Returns a prompt."""
    return Prompt(array("I", tokens).tobytes())


def hold_many(pool: Pool, count: int) -> Sequence[int]:
    """Allocates so many short sequences of one group; returns their numbers."""
    return [finish(pool.allocate(1, prompt(number), group="g")).number for number in range(count)]


def slice_count(pool: Pool, steps: Steps[Any]) -> int:
    """Runs an operation, checks every rule after each slice, and returns how many there were."""
    count = 1
    for _ in steps:
        pool.check_invariants()
        count += 1
    pool.check_invariants()
    return count


def test_many_short_sequences_are_released_in_slices() -> None:
    """By their group, or with their session."""
    pool = new_pool(1_000)
    hold_many(pool, 1_000)
    assert slice_count(pool, pool.release_group(1, "g")) > 5
    hold_many(pool, 1_000)
    finish(pool.end_session(1))
    assert slice_count(pool, pool.session_quiet(1)) > 5
    assert pool.stats().free_block_count == 1_000


def test_a_long_reservation_is_quarantined_in_slices() -> None:
    """One sequence may hold most of the pool."""
    pool = new_pool(5_000)
    finish(pool.allocate(1, prompt(1), reserve_tokens=4_900 * BLOCK_TOKENS))
    assert slice_count(pool, pool.end_session(1)) > 8
    assert finish(pool.session_quiet(1)) == 1
    assert pool.stats().free_block_count == 5_000


def test_as_many_extra_keys_as_are_allowed_cost_milliseconds_in_one_block() -> None:
    """Their encoding grows with their number, not with its square: a service stood still for minutes."""
    keys = [ExtraKey(3, bytes(48))] * validate.MAX_EXTRA_KEYS
    start = time.thread_time()
    (encoded,) = extras_by_block(keys, validate.MAX_EXTRA_KEYS).values()
    assert time.thread_time() - start < 0.5
    assert len(encoded) == len(keys) * (16 + 48)


def test_no_reply_has_tables_longer_than_a_message_takes() -> None:
    """Refused before anything is held: a reply that cannot be sent would leave its blocks held by nobody."""
    pool = new_pool(validate.MAX_TABLE_BLOCKS + 8)
    too_long = validate.MAX_TABLE_BLOCKS * BLOCK_TOKENS
    with pytest.raises(InvalidField, match="reserve_tokens"):
        finish(pool.allocate(1, prompt(1), reserve_tokens=too_long))
    view = finish(pool.allocate(1, prompt(*range(520 * BLOCK_TOKENS))))
    finish(pool.commit(1, view.number, Commit(view.token_count)))
    with pytest.raises(InvalidField, match="capacity_tokens"):
        finish(pool.extend(1, view.number, too_long + 1))
    with pytest.raises(InvalidField, match="child_count"):
        finish(pool.fork(1, view.number, 1_024))
    assert (pool.stats().shared_block_count, pool.stats().sequence_count) == (0, 1)
