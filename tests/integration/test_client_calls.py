"""Calls of a sequence against a real service; each test runs with the synchronous and the asyncio client."""

from typing import Any

import numpy as np
import pytest

from integration.client_kinds import harbor as harbor
from integration.client_kinds import pool as pool
from integration.pool_content import classes, put
from kvharbor.client import (
    CommitBackwards,
    CommitResult,
    CursorOutOfRange,
    ExtraKey,
    InvalidField,
    Lookup,
    Namespace,
    PoolExhausted,
    RequestIdReused,
    RequestTooLarge,
    SequenceEnded,
)


def test_a_sequence_goes_through_its_life(pool: Any) -> None:
    """Allocate, commit, extend, commit, release: cursors and classes at each step."""
    held = pool.allocate(range(20), reserve_tokens=4)
    assert (held.cached_tokens, held.computed_tokens, held.token_count, held.capacity_tokens) == (0, 0, 20, 32)
    assert classes(pool) == (6, 2, 0, 0)
    assert held.commit(20) == CommitResult(16)
    assert classes(pool) == (6, 1, 1, 0)
    held.extend(1)
    assert (held.capacity_tokens, len(held.table), len(held.generations)) == (48, 3, 3)
    assert held.commit(33, list(range(20, 33))) == CommitResult(32)
    held.release()
    held.release()
    assert (held.ended, classes(pool)) == (True, (6, 0, 0, 2))
    assert pool.lookup(range(33)) == Lookup(present_tokens=32, cached_tokens=32)


def test_leaving_the_with_releases_also_after_an_error(pool: Any) -> None:
    """The caller's own error comes through."""
    with pytest.raises(ZeroDivisionError), pool.allocate(range(20)):
        raise ZeroDivisionError
    assert classes(pool) == (8, 0, 0, 0)


def test_every_form_of_tokens_finds_the_same_blocks(pool: Any) -> None:
    """Lists, arrays and bytes name the same prompt."""
    put(pool, list(range(16)))
    for tokens in (range(16), np.arange(16), np.arange(16, dtype="<u4").tobytes()):
        assert pool.lookup(tokens).present_tokens == 16


def test_the_match_is_bounded_by_max_cached_tokens(pool: Any) -> None:
    """None: all but one token; 0: no reuse; all: allowed."""
    put(pool, range(32))
    for bound, expected in ((None, 16), (0, 0), (31, 16), (32, 32)):
        with pool.allocate(range(32), max_cached_tokens=bound) as held:
            assert held.cached_tokens == expected
        assert pool.lookup(range(32), max_cached_tokens=bound) == Lookup(32, expected)


def test_namespaces_and_extra_keys_keep_prompts_apart(pool: Any) -> None:
    """Equal tokens meet only in the same namespace, with the same extra keys."""
    put(pool, range(16), namespace=Namespace(version="v1", adapter="a", salt=b"s"))
    put(pool, range(16), extra_keys=[ExtraKey(3, b"picture")])
    for namespace, expected in (
        (Namespace("v1", "a", b"s"), 16),
        (Namespace("v2", "a", b"s"), 0),
        (Namespace("v1", "", b"s"), 0),
        (Namespace("v1", "a", b"t"), 0),
        (Namespace(), 0),
    ):
        assert pool.lookup(range(16), namespace=namespace).present_tokens == expected
    assert pool.lookup(range(16), extra_keys=[ExtraKey(3, b"picture")]).present_tokens == 16
    assert pool.lookup(range(16), extra_keys=[ExtraKey(4, b"picture")]).present_tokens == 0


def test_a_miss_tells_its_reason(harbor: Any, pool: Any) -> None:
    """[Y1] With an allocate and a lookup, and summed up in the statistics: one reason for each allocate."""
    with pool.allocate(range(32)) as first:
        assert first.miss.kind == "never_seen"
        assert pool.lookup(range(32)).miss.kind == "not_committed"
        first.commit(16)
    assert pool.lookup(range(32), namespace=Namespace(salt=b"s")).miss.differing_parts == ("salt",)
    put(pool, range(100, 228))
    with pool.allocate(range(17)) as evicted:
        miss = evicted.miss
    assert (miss.kind, miss.present_tokens, miss.evicted_by_session) == ("evicted", 0, harbor.session_id)
    assert 0 <= miss.evicted_s < miss.remembered_s
    assert str(miss) == f"evicted {miss.evicted_s:.3g} s ago for session {harbor.session_id}"
    pool.evict_unheld()
    assert pool.lookup(range(100, 116)).miss.evicted_by_administrator
    put(pool, range(100, 116))
    traffic = pool.stats().traffic
    assert (traffic.misses["never_seen"], traffic.misses["evicted"], traffic.misses["not_committed"]) == (2, 1, 0)
    assert traffic.recomputed_token_count == 16
    assert sum(traffic.reuse_gaps.counts) == 1
    assert traffic.residences.bound_of(0.5) is not None


def test_extra_keys_come_with_the_tokens_that_a_commit_adds(pool: Any) -> None:
    """A placeholder that is generated or appended later has its identity too."""
    with pool.allocate(range(8)) as held:
        held.commit(16, list(range(8, 16)), extra_keys=[ExtraKey(9, b"picture")])
    assert pool.lookup(range(16)).present_tokens == 0
    assert pool.lookup(range(16), extra_keys=[ExtraKey(9, b"picture")]).present_tokens == 16


def test_a_request_id_makes_allocate_idempotent(pool: Any) -> None:
    """The duplicate is the same sequence, and the same object; other arguments are refused."""
    first = pool.allocate(range(20), request_id="r")
    again = pool.allocate(range(20), request_id="r")
    assert (first.id, first.table.tolist()) == (again.id, again.table.tolist())
    again.extend(20)
    assert first.capacity_tokens == again.capacity_tokens > 20
    with pytest.raises(RequestIdReused):
        pool.allocate(range(21), request_id="r")
    assert pool.release(request_id="r") == 1
    assert pool.release(request_id="r") == 0
    first.release()


def test_a_group_is_released_together(pool: Any) -> None:
    """Sequences and the children of a fork, by the name they were given."""
    with pool.allocate(range(20), group="g") as parent:
        children = parent.fork(2, group="g")
        assert pool.release(group="g") == 3
        assert [each.ended for each in (parent, *children)] == [True] * 3
    assert classes(pool) == (8, 0, 0, 0)
    with pytest.raises(InvalidField):
        pool.release()


def test_a_full_pool_refuses_with_the_numbers_and_a_time(pool: Any) -> None:
    """Full now is another error than too large for ever."""
    with pool.allocate(range(100)):
        with pytest.raises(PoolExhausted) as full:
            pool.allocate(range(1000, 1020))
        assert full.value.metadata["neededBlockCount"] == "2"
        assert full.value.metadata["availableBlockCount"] == "1"
        assert full.value.retry_after_s
    with pytest.raises(RequestTooLarge) as too_large:
        pool.allocate(range(1000))
    assert too_large.value.metadata == {"neededBlockCount": "63", "usableBlockCount": "8"}
    assert too_large.value.retry_after_s is None


def test_an_extend_that_finds_no_room_leaves_the_sequence_as_it_was(pool: Any) -> None:
    """The remedy is to preempt another sequence; the sequence itself goes on."""
    with pool.allocate(range(16)) as held, pool.allocate(range(1000, 1112)):
        with pytest.raises(PoolExhausted):
            held.extend(1)
        assert (held.capacity_tokens, len(held.table)) == (16, 1)
        assert held.commit(16) == CommitResult(16)


def test_batches_tell_each_outcome_and_raise_none(pool: Any) -> None:
    """A refused item does not touch its neighbours."""
    with pool.allocate(range(16)) as one, pool.allocate(range(100, 132)) as two:
        outcomes = pool.commit_many([(one, 16), (two, 33)])
        assert outcomes[0] == CommitResult(16)
        assert isinstance(outcomes[1], CursorOutOfRange)
        outcomes = pool.extend_many([(one, 16), (two, 1000)])
        assert outcomes[0] is None
        assert isinstance(outcomes[1], RequestTooLarge)
        assert (one.capacity_tokens, two.capacity_tokens) == (32, 32)


def test_wrong_cursors_are_refused_and_change_nothing(pool: Any) -> None:
    """Backwards, beyond the known tokens, beyond the capacity."""
    with pool.allocate(range(20)) as held:
        held.commit(10)
        with pytest.raises(CommitBackwards):
            held.commit(9)
        with pytest.raises(CursorOutOfRange):
            held.commit(21)
        with pytest.raises(CursorOutOfRange):
            held.commit(33, range(13))
        assert (held.computed_tokens, held.token_count) == (10, 20)
        held.commit(10)


def test_a_sequence_that_was_handed_off_is_refused_here(pool: Any) -> None:
    """Releasing it is no error and takes nothing from its new owner."""
    held = pool.allocate(range(20))
    token = held.handoff(20)
    with pytest.raises(SequenceEnded):
        held.commit(20)
    held.release()
    with pool.adopt(token) as adopted:
        assert (adopted.cached_tokens, adopted.computed_tokens, adopted.token_count) == (20, 20, 20)
