"""The contract of every kind of arena, seen from two processes."""

import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest

from contract.arena_kinds import ArenaKind
from contract.peer import Peer
from kvharbor.gpumem import (
    BlockOrder,
    BlockViews,
    DataType,
    Descriptor,
    HostArena,
    Layout,
    Mapping,
    MappingInUse,
)

pytestmark = pytest.mark.slow


@pytest.fixture(params=list(BlockOrder), ids=lambda order: order.value)
def descriptor(request: pytest.FixtureRequest) -> Descriptor:
    return Layout.attention("m", 3, 2, 8, DataType.FLOAT16, 16, order=request.param).descriptor(6)


@pytest.fixture
def arena(kind: ArenaKind, descriptor: Descriptor, _leave_nothing_behind: None) -> Iterator[HostArena]:
    with kind.create(descriptor.size_bytes) as created:
        yield created


@pytest.fixture
def mapping(arena: HostArena) -> Iterator[Mapping]:
    with arena.map() as mapped:
        yield mapped


@pytest.fixture
def views(mapping: Mapping, descriptor: Descriptor) -> Iterator[BlockViews]:
    made = BlockViews(mapping, descriptor)
    yield made
    made.close()


def stamp(descriptor: Descriptor, seed: int) -> bytes:
    """A page of recognisable bytes."""
    page_bytes = descriptor.spans[0].plane.page_bytes
    return np.random.default_rng(seed).integers(0, 256, page_bytes, dtype=np.uint8).tobytes()


def every_page(descriptor: Descriptor) -> list[tuple[str, int, int]]:
    return [
        (span.plane.name, layer, block)
        for span in descriptor.spans
        for layer in range(span.plane.layer_count)
        for block in range(descriptor.block_count)
    ]


def attach(peer: Peer, kind: ArenaKind, arena: HostArena, descriptor: Descriptor) -> None:
    assert peer.ask("attach", kind.name, descriptor, True, fds=kind.export(arena)) is None


def test_a_new_arena_reads_as_zeros_in_another_process(
    kind: ArenaKind, arena: HostArena, descriptor: Descriptor, peer: Peer
) -> None:
    """[P6]: stale bytes must be finite numbers, so an arena starts zeroed."""
    attach(peer, kind, arena, descriptor)
    assert {peer.ask("read", *page).strip(b"\0") for page in every_page(descriptor)} == {b""}


def test_every_page_written_here_is_read_there_and_back(
    kind: ArenaKind, arena: HostArena, descriptor: Descriptor, views: BlockViews, peer: Peer
) -> None:
    """Both processes see one memory, and the descriptor means the same page to both."""
    attach(peer, kind, arena, descriptor)
    for seed, page in enumerate(every_page(descriptor)):
        views.page(*page)[:] = np.frombuffer(stamp(descriptor, seed), dtype=np.uint8)
    for seed, page in enumerate(every_page(descriptor)):
        assert peer.ask("read", *page) == stamp(descriptor, seed)
    for seed, page in enumerate(every_page(descriptor)):
        peer.ask("write", *page, stamp(descriptor, 1000 + seed))
    for seed, page in enumerate(every_page(descriptor)):
        assert views.page(*page).tobytes() == stamp(descriptor, 1000 + seed)


def test_a_copy_made_there_is_seen_here(
    kind: ArenaKind, arena: HostArena, descriptor: Descriptor, views: BlockViews, peer: Peer
) -> None:
    """A copy takes whole blocks, every plane and layer, and touches no other block."""
    attach(peer, kind, arena, descriptor)
    for seed, page in enumerate(every_page(descriptor)):
        views.page(*page)[:] = np.frombuffer(stamp(descriptor, seed), dtype=np.uint8)
    expected = {page: views.page(*page).tobytes() for page in every_page(descriptor)}
    for plane, layer, block in every_page(descriptor):
        if block in (4, 5):
            expected[plane, layer, block] = expected[plane, layer, 1]
    assert peer.ask("copy", descriptor, [(1, 4), (1, 5)]) is None
    assert {page: views.page(*page).tobytes() for page in every_page(descriptor)} == expected


def test_numpy_and_torch_views_are_the_same_memory_without_a_copy(descriptor: Descriptor, views: BlockViews) -> None:
    """A store through one view is read through every other, and through the raw page."""
    array, tensor = views.numpy("v", 2), views.torch("v", 2)
    array[3, 5, 1, :] = 1.5
    assert tensor[3, 5, 1].tolist() == [1.5] * 8
    tensor[3, 5, 0] = 2.5
    assert array[3, 5, 0].tolist() == [2.5] * 8
    assert views.page("v", 2, 3).tobytes() == array[3].tobytes()
    assert (tensor.shape, array.shape) == ((6, 16, 2, 8), (6, 16, 2, 8))


def test_an_attached_process_that_is_killed_leaves_the_arena_to_the_others(
    kind: ArenaKind,
    arena: HostArena,
    descriptor: Descriptor,
    views: BlockViews,
    peer: Peer,
    second_peer: Peer,
) -> None:
    """Its bytes stay, the owner goes on, and another process can attach."""
    attach(peer, kind, arena, descriptor)
    peer.ask("write", "k", 0, 1, stamp(descriptor, 1))
    peer.kill()
    assert views.page("k", 0, 1).tobytes() == stamp(descriptor, 1)
    views.page("k", 0, 2)[:] = 7
    attach(second_peer, kind, arena, descriptor)
    assert second_peer.ask("read", "k", 0, 1) == stamp(descriptor, 1)
    assert set(second_peer.ask("read", "k", 0, 2)) == {7}


def test_an_owner_that_is_killed_leaves_attached_processes_their_memory(
    kind: ArenaKind, descriptor: Descriptor, peer: Peer, second_peer: Peer
) -> None:
    """A mapping outlives the owner, and those that have it still share it."""
    _, fds = peer.call("create", kind.name, descriptor)
    try:
        with kind.attach(fds, descriptor.size_bytes, True) as mapping:
            second_peer.ask("attach", kind.name, descriptor, True, fds=fds)
            peer.kill()
            views = BlockViews(mapping, descriptor)
            views.page("v", 1, 3)[:] = 9
            assert set(second_peer.ask("read", "v", 1, 3)) == {9}
            views.close()
    finally:
        for fd in fds:
            os.close(fd)


def test_a_detached_process_has_no_mapping_and_the_owner_goes_on(
    kind: ArenaKind, arena: HostArena, descriptor: Descriptor, views: BlockViews, peer: Peer
) -> None:
    """Detaching is one side's affair."""
    attach(peer, kind, arena, descriptor)
    assert peer.ask("detach") is None
    assert peer.ask("arena_lines") == (0, 0)
    views.page("k", 2, 5)[:] = 3
    assert set(views.page("k", 2, 5).tolist()) == {3}


@pytest.mark.parametrize("make_view", [BlockViews.numpy, BlockViews.torch])
def test_a_mapping_cannot_be_closed_under_a_living_view(
    make_view: object, mapping: Mapping, descriptor: Descriptor
) -> None:
    """Closing would turn the view's next load into a SIGSEGV: it is refused until the view is gone."""
    views = BlockViews(mapping, descriptor)
    view = make_view(views, "k", 0)  # type: ignore[operator]
    views.close()
    with pytest.raises(MappingInUse, match="live views"):
        mapping.close()
    view[1] = 1
    del view
    mapping.close()


def test_a_read_only_mapping_gives_read_only_arrays(
    arena: HostArena, descriptor: Descriptor, views: BlockViews
) -> None:
    """It sees what others write, and numpy refuses a store before the memory does."""
    with arena.map(writable=False) as mapping:
        reader = BlockViews(mapping, descriptor)
        views.numpy("k", 1)[2] = 4
        assert set(reader.numpy("k", 1)[2].ravel().tolist()) == {4.0}
        assert set(reader.torch("k", 1)[2].ravel().tolist()) == {4.0}
        for array in (reader.numpy("k", 1), reader.page("k", 1, 2), reader.numpy_run("k", 1, 2, 1)):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1
        del array
        reader.close()


def test_a_store_past_a_read_only_mapping_kills_the_process_that_tries(
    kind: ArenaKind, arena: HostArena, descriptor: Descriptor, views: BlockViews, peer: Peer
) -> None:
    """Read-only is enforced by the memory itself, not only by numpy's flag."""
    peer.ask("attach", kind.name, descriptor, False, fds=kind.export(arena))
    with pytest.raises(EOFError):
        peer.ask("store_raw")
    peer.process.wait(30)
    assert peer.process.returncode == -signal.SIGSEGV
    assert set(views.page("k", 0, 0).tolist()) == {0}


def test_a_forked_child_of_an_attached_process_has_no_mapping(
    kind: ArenaKind, arena: HostArena, descriptor: Descriptor, peer: Peer
) -> None:
    """A child could go on writing after its parent is known to be dead."""
    attach(peer, kind, arena, descriptor)
    assert peer.ask("arena_lines") == (1, 0)
