"""Every call of the clients against a real service; each test runs with the synchronous and the asyncio client."""

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from contract.leaks import mapped_arenas, open_descriptors
from integration.client_kinds import KINDS, connector
from integration.client_worker import BLOCK_TOKENS, LAYOUT, pool_size
from kvharbor.client import (
    BlockHeld,
    BlocksRemoved,
    BlocksStored,
    CommitBackwards,
    CommitResult,
    CursorOutOfRange,
    ExtraKey,
    HarborClosed,
    InsufficientMemory,
    InvalidField,
    LayoutMismatch,
    Lookup,
    Namespace,
    PinEnded,
    PinNotFound,
    PoolExhausted,
    PoolInUse,
    PoolNotFound,
    PoolSizeMismatch,
    Progress,
    RequestIdReused,
    RequestTooLarge,
    SequenceEnded,
    WarmBudgetExceeded,
)
from kvharbor.gpumem import DataType, Layout
from service_process import ServiceProcess

Connect = Callable[..., Any]


@pytest.fixture
def target(shared_service: ServiceProcess) -> str:
    """The address of a service; each test has a pool of its own there."""
    return shared_service.target


@pytest.fixture(params=KINDS)
def open_harbor(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Connects with the client under test."""
    with connector(request.param) as start:
        yield start


@pytest.fixture
def harbor(open_harbor: Connect, target: str) -> Any:
    """A harbor of the client under test."""
    return open_harbor(target, client_name="test")


@pytest.fixture
def pool(harbor: Any, request: pytest.FixtureRequest) -> Any:
    """A pool of 8 blocks of 16 tokens that no other test has."""
    name = f"calls-{zlib.crc32(request.node.nodeid.encode()):x}"
    return harbor.open_pool(name, LAYOUT, pool_size(8))


def counts(pool: Any) -> tuple[int, int, int, int]:
    stats = pool.stats()
    return (
        stats.free_block_count,
        stats.reserved_block_count,
        stats.active_block_count,
        stats.cached_block_count,
    )


def put(pool: Any, tokens: Any, **options: Any) -> None:
    with pool.allocate(tokens, **options) as held:
        held.commit(len(tokens))


def test_a_sequence_goes_through_its_life(pool: Any) -> None:
    """Allocate, commit, extend, commit, release: cursors and classes at each step."""
    held = pool.allocate(range(20), reserve_tokens=4)
    assert (held.cached_tokens, held.computed_tokens, held.token_count, held.capacity_tokens) == (0, 0, 20, 32)
    assert counts(pool) == (6, 2, 0, 0)
    assert held.commit(20) == CommitResult(16)
    assert counts(pool) == (6, 1, 1, 0)
    held.extend(1)
    assert (held.capacity_tokens, len(held.table), len(held.generations)) == (48, 3, 3)
    assert held.commit(33, list(range(20, 33))) == CommitResult(32)
    held.release()
    held.release()
    assert (held.ended, counts(pool)) == (True, (6, 0, 0, 2))
    assert pool.lookup(range(33)) == Lookup(present_tokens=32, cached_tokens=32)


def test_leaving_the_with_releases_also_after_an_error(pool: Any) -> None:
    """The caller's own error comes through."""
    with pytest.raises(ZeroDivisionError), pool.allocate(range(20)):
        raise ZeroDivisionError
    assert counts(pool) == (8, 0, 0, 0)


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
    """The duplicate is the same sequence; other arguments are refused."""
    first = pool.allocate(range(20), request_id="r")
    again = pool.allocate(range(20), request_id="r")
    assert (first.id, first.table.tolist()) == (again.id, again.table.tolist())
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
    assert counts(pool) == (8, 0, 0, 0)
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


def test_a_prefix_is_pinned_computed_and_let_go(pool: Any) -> None:
    """Warmup gives a sequence for what is missing; what is committed stays pinned past its release."""
    warm = pool.warmup(range(32), "system-prompt", ttl_s=60)
    assert (warm.pinned_tokens, warm.missing_tokens, warm.ttl_s) == (0, 32, 60)
    with warm.sequence as missing:
        missing.commit(32)
    stats = pool.stats()
    assert (stats.pin_count, stats.warm_budget_used_block_count, stats.warm_budget_block_count) == (1, 2, 2)
    present = pool.warmup_present(range(48), "system-prompt")
    assert (present.pinned_tokens, present.ttl_s, present.sequence) == (32, None, None)
    with pytest.raises(WarmBudgetExceeded):
        pool.warmup(range(100, 148), "another")
    pool.unwarm("system-prompt")
    with pytest.raises(PinNotFound):
        pool.unwarm("system-prompt")


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
    assert counts(pool) == (8, 0, 0, 0)


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
    with pytest.raises(PoolSizeMismatch):
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
