"""Calls of a harbor and a pool against a real service; each test runs with the synchronous and the asyncio client."""

import dataclasses
import gc
from typing import Any

import pytest

from contract.leaks import mapped_arenas, open_descriptors
from integration.client_kinds import Connect
from integration.client_kinds import harbor as harbor
from integration.client_kinds import pool as pool
from integration.client_worker import BLOCK_TOKENS, LAYOUT, pool_size
from integration.pool_content import classes, put
from kvharbor.client import (
    BlockHeld,
    BlocksRemoved,
    BlocksStored,
    HarborClosed,
    InsufficientMemory,
    InvalidField,
    LayoutMismatch,
    PinEnded,
    PinNotFound,
    PinStats,
    PoolInUse,
    PoolNotFound,
    PoolSizeMismatch,
    Progress,
    SequenceEnded,
    WarmBudgetExceeded,
)
from kvharbor.gpumem import DataType, Layout


def test_a_prefix_is_pinned_computed_and_let_go(harbor: Any, pool: Any) -> None:
    """Warmup gives a sequence for what is missing; what is committed stays pinned past its release."""
    warm = pool.warmup(range(32), "system-prompt", ttl_s=60)
    assert (warm.pinned_tokens, warm.missing_tokens, warm.ttl_s) == (0, 32, 60)
    with warm.sequence as missing:
        missing.commit(32)
    stats = pool.stats()
    assert (stats.pin_count, stats.warm_budget_used_block_count, stats.warm_budget_block_count) == (1, 2, 2)
    (pin,) = stats.pins
    assert dataclasses.replace(pin, ttl_s=None) == PinStats(
        "system-prompt", harbor.tenant, 32, 0, filling=False, ttl_s=None
    )
    assert 0 < pin.ttl_s <= 60
    present = pool.warmup_present(range(48), "system-prompt")
    assert (present.pinned_tokens, present.ttl_s, present.sequence) == (32, None, None)
    assert [pin.ttl_s for pin in pool.stats().pins] == [None]
    with pytest.raises(WarmBudgetExceeded):
        pool.warmup(range(100, 148), "another")
    pool.unwarm("system-prompt")
    with pytest.raises(PinNotFound):
        pool.unwarm("system-prompt")


def test_a_pin_that_is_being_filled_is_told_of_with_the_same_sequence(pool: Any) -> None:
    """One object: what is released under one name must not be written to under the other, as it is another's then."""
    first = pool.warmup(range(32), "system-prompt").sequence
    first.commit(16)
    again = pool.warmup(range(32), "system-prompt").sequence
    assert (again.id, again.computed_tokens) == (first.id, 16)
    again.release()
    with pytest.raises(SequenceEnded):
        first.slots(16, 32)


def test_an_administrator_evicts_what_nobody_holds(pool: Any) -> None:
    """One block with its descendants, or all; a held one is refused."""
    with pool.allocate(range(48)) as held:
        held.commit(48)
        table, generations = held.table.tolist(), held.generations.tolist()
        with pytest.raises(BlockHeld):
            pool.evict_block(table[1], generations[1])
    assert pool.evict_block(table[1], generations[1]) == 2
    assert pool.lookup(range(48)).present_tokens == 16
    assert pool.evict_unheld() == 1
    assert classes(pool) == (8, 0, 0, 0)


def test_a_watch_shows_the_index_then_what_happens_and_can_be_resumed(pool: Any) -> None:
    """Snapshot, progress, stored, removed, pin ended; a resumed watch continues after its revision."""
    put(pool, range(32))
    with pool.watch() as watch:
        events = iter(watch)
        snapshot = next(events)
        assert isinstance(snapshot, BlocksStored)
        assert [len(digest) for digest in snapshot.digests] == [32, 32]
        assert len(snapshot.block_ids) == len(snapshot.generations) == 2
        assert isinstance(next(events), Progress)
        put(pool, range(100, 116))
        stored = next(events)
        assert isinstance(stored, BlocksStored)
        assert stored.parent_digest == snapshot.parent_digest
        pool.warmup_present(range(100, 116), "w")
        pool.unwarm("w")
        pool.evict_unheld()
        kinds = [next(events)]
        while not isinstance(kinds[-1], BlocksRemoved):
            kinds.append(next(events))
        assert PinEnded(kinds[0].revision, "w", expired=False) == kinds[0]
        revision = watch.revision
    with pool.watch(start_revision=revision) as resumed:
        assert stored == next(event for event in resumed if isinstance(event, BlocksStored))


def test_a_recording_tells_of_requests_as_they_end(pool: Any) -> None:
    """How long they were, and what they have in common; never a token. Closed, it ends without an error."""
    with pool.record() as recording:
        assert recording.block_tokens == BLOCK_TOKENS
        requests = iter(recording)
        put(pool, range(40))
        put(pool, range(32))
        longer, shorter = next(requests), next(requests)
        assert (longer.input_tokens, shorter.input_tokens) == (40, 32)
        assert longer.block_names == shorter.block_names
        assert len(set(longer.block_names)) == 2
        assert 0 <= longer.arrival_s <= shorter.arrival_s
        recording.close()
        assert list(requests) == []


def test_a_recording_that_is_stopped_has_all_that_had_ended(pool: Any) -> None:
    """What was not read yet too; and it ends without an error."""
    with pool.record() as recording:
        for size in range(1, 41):
            put(pool, range(size))
        recording.stop()
        assert [request.input_tokens for request in recording] == [*range(1, 41)]


def test_a_recording_of_no_pool_is_refused_at_once(harbor: Any, pool: Any) -> None:
    """Where it is asked for, not where it is read."""
    handle = harbor.find_pool(pool.name)
    handle.calls.pool_id = handle.calls.pool_id[:-1] + "999"
    with pytest.raises(PoolNotFound):
        handle.record()


def test_pools_are_found_listed_and_dropped(harbor: Any, pool: Any) -> None:
    """A handle without memory is enough for tools; a pool in use stays."""
    assert pool.name in [info.name for info in harbor.list_pools()]
    info = next(info for info in harbor.list_pools() if info.name == pool.name)
    assert (info.pool_id, info.model, info.block_tokens, info.block_count) == (pool.id, "stamps@1", 16, 9)
    assert harbor.find_pool(pool.name).stats().pool_id == pool.id
    assert [each.name for each in harbor.stats(pool.name).pools] == [pool.name]
    with pool.allocate(range(3)), pytest.raises(PoolInUse):
        harbor.drop_pool(pool.name)
    assert harbor.drop_pool(pool.name)
    assert not harbor.drop_pool(pool.name)
    for missing in (lambda: harbor.find_pool(pool.name), lambda: harbor.stats(pool.name), pool.stats):
        with pytest.raises(PoolNotFound):
            missing()


def test_a_pool_is_opened_once_a_harbor(harbor: Any, pool: Any) -> None:
    """The second open returns the same mapping; another layout or size is refused with what differs."""
    again = harbor.open_pool(pool.name, LAYOUT)
    assert again.views is pool.views
    other = Layout.attention("stamps@1", 2, 2, 8, DataType.FLOAT32, BLOCK_TOKENS)
    with pytest.raises(LayoutMismatch) as mismatch:
        harbor.open_pool(pool.name, other)
    assert [key for key in mismatch.value.metadata if "dim" in key.lower()]
    with pytest.raises(PoolSizeMismatch, match="ask for that size or for none, or drop the pool first"):
        harbor.open_pool(pool.name, LAYOUT, pool_size(9))
    with pytest.raises(InsufficientMemory):
        harbor.open_pool("huge", LAYOUT, "1TiB")
    with pytest.raises(InvalidField):
        harbor.open_pool("no/slash", LAYOUT)


def test_a_second_session_shares_the_pool(open_harbor: Connect, harbor: Any, pool: Any, target: str) -> None:
    """What one commits the other finds; the bytes are the same memory."""
    other = open_harbor(target).open_pool(pool.name, LAYOUT)
    with pool.allocate(range(16)) as held:
        pool.views.numpy("k", 1)[held.slots(0, 16)] = 5.0
        held.commit(16)
    with other.allocate(range(17)) as held:
        assert held.cached_tokens == 16
        assert (other.views.numpy("k", 1)[held.slots(0, 16)] == 5.0).all()


def test_the_service_describes_itself(harbor: Any) -> None:
    """Versions, epoch and memory; the session's own names beside."""
    info = harbor.server_info()
    assert (info.api_versions, info.arena_kinds, info.epoch) == (("v1",), ("host",), harbor.epoch)
    assert 0 < info.memory_available_bytes <= info.memory_bytes == 64 * 2**20
    assert harbor.session_id
    assert harbor.tenant.startswith("uid-")


def test_a_closed_harbor_leaves_no_memory_behind(open_harbor: Connect, pool: Any, target: str) -> None:
    """Its mapping is gone and so is the descriptor, which was closed as soon as it was mapped."""
    gc.collect()  # what earlier tests have left may not go meanwhile
    mapped = mapped_arenas()
    harbor = open_harbor(target)
    other = harbor.open_pool(pool.name, LAYOUT)
    assert len(mapped_arenas()) == len(mapped) + 1
    other.views.numpy("k", 0)[0] = 1.0
    harbor.close()
    assert mapped_arenas() == mapped
    assert [what for what in open_descriptors().values() if "memfd:kvharbor" in what] == []


def test_a_closed_harbor_refuses_and_its_sequences_release_quietly(harbor: Any, pool: Any, target: str) -> None:
    """C6: close ends everything, though an array over the pool lives on."""
    held = pool.allocate(range(20))
    keys = pool.views.numpy("k", 0)
    harbor.close()
    harbor.close()
    held.release()
    assert held.ended
    assert keys.shape == (9, 16, 2, 4)
    for refused in (lambda: pool.allocate(range(3)), pool.stats, lambda: harbor.open_pool("q", LAYOUT)):
        with pytest.raises(HarborClosed):
            refused()
