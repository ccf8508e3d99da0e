"""The contract of every kind of arena, seen from the owner and two processes that map it."""

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from contract.arena_kinds import KINDS, TestedKind, kinds_where
from contract.peer import Peer, Refusal
from kvharbor.gpumem import ArenaUnfit, BlockOrder, DataType, Descriptor, Export, Layout, MappingInUse, attach

pytestmark = pytest.mark.slow

IN_PLACE = kinds_where(lambda kind: kind.stays_in_place)
READ_ONLY = kinds_where(lambda kind: kind.read_only)


def described(order: BlockOrder) -> Descriptor:
    # Longer than one chunk of the stub's memory, and no multiple of it.
    return Layout.attention("m", 3, 2, 64, DataType.FLOAT16, 16, order=order).descriptor(6)


DESCRIPTOR = described(BlockOrder.LAYER_MAJOR)


@pytest.fixture
def kind(kind_name: str) -> TestedKind:
    return KINDS[kind_name]


@pytest.fixture
def export(kind_name: str, owner: Peer) -> Iterator[Export]:
    """A new arena, made by another process."""
    made = owner.create(kind_name, DESCRIPTOR.size_bytes)
    yield made
    for fd in made.fds:
        os.close(fd)


@pytest.fixture
def mapped(export: Export) -> Iterator[Any]:
    with contextlib.closing(attach(export)) as here:
        yield here


def stamp(seed: int, size_bytes: int = DESCRIPTOR.spans[0].plane.page_bytes) -> bytes:
    """Recognisable bytes, a page if nothing else is said."""
    return np.random.default_rng(seed).integers(0, 256, size_bytes, dtype=np.uint8).tobytes()


def every_page(descriptor: Descriptor) -> list[tuple[str, int, int]]:
    return [
        (span.plane.name, layer, block)
        for span in descriptor.spans
        for layer in range(span.plane.layer_count)
        for block in range(descriptor.block_count)
    ]


def test_a_new_arena_reads_as_zeros_in_another_process(kind_name: str, export: Export, peer: Peer) -> None:
    """[P6]: stale bytes must be finite numbers, so an arena starts zeroed."""
    assert peer.attach(kind_name, export) is None
    assert peer.ask("read", 0, DESCRIPTOR.size_bytes) == bytes(DESCRIPTOR.size_bytes)


def test_every_page_written_here_is_read_there_and_back(
    kind_name: str, kind: TestedKind, export: Export, mapped: Any, peer: Peer
) -> None:
    """Both processes see one memory, and the descriptor means the same page to both."""
    peer.attach(kind_name, export)
    offsets = [DESCRIPTOR.page_offset_bytes(*page) for page in every_page(DESCRIPTOR)]
    for seed, offset_bytes in enumerate(offsets):
        kind.write(mapped, offset_bytes, stamp(seed))
    assert [peer.ask("read", offset_bytes, len(stamp(0))) for offset_bytes in offsets] == [
        stamp(seed) for seed in range(len(offsets))
    ]
    for seed, offset_bytes in enumerate(offsets):
        peer.ask("write", offset_bytes, stamp(1000 + seed))
    assert [kind.read(mapped, offset_bytes, len(stamp(0))) for offset_bytes in offsets] == [
        stamp(1000 + seed) for seed in range(len(offsets))
    ]


@pytest.mark.parametrize("order", list(BlockOrder))
def test_a_copy_made_there_is_seen_here(
    order: BlockOrder, kind_name: str, kind: TestedKind, export: Export, mapped: Any, peer: Peer
) -> None:
    """A copy takes whole blocks, every plane and layer, and touches no other block."""
    descriptor = described(order)
    peer.attach(kind_name, export)
    kind.write(mapped, 0, stamp(1, descriptor.size_bytes))

    def pages() -> dict[tuple[str, int, int], bytes]:
        return {
            page: kind.read(mapped, descriptor.page_offset_bytes(*page), len(stamp(0)))
            for page in every_page(descriptor)
        }

    before = pages()
    assert peer.ask("copy", descriptor, [(1, 4), (1, 5)]) is None
    assert pages() == {
        (plane, layer, block): before[plane, layer, 1 if block in (4, 5) else block] for plane, layer, block in before
    }


def test_an_arena_is_mapped_without_the_descriptors_once_it_is(
    kind_name: str, kind: TestedKind, owner: Peer, peer: Peer
) -> None:
    """[M9]: the memory is held by the mapping alone."""
    export = owner.create(kind_name, DESCRIPTOR.size_bytes)
    peer.attach(kind_name, export)
    with contextlib.closing(attach(export)) as mapped:
        for fd in export.fds:
            os.close(fd)
        kind.write(mapped, 7, b"still here")
        assert peer.ask("read", 7, 10) == b"still here"


def test_an_attached_process_that_is_killed_leaves_the_arena_to_the_others(
    kind_name: str, kind: TestedKind, export: Export, mapped: Any, peer: Peer, second_peer: Peer
) -> None:
    """Its bytes stay, and another process can attach."""
    peer.attach(kind_name, export)
    peer.ask("write", 0, stamp(1))
    peer.kill()
    assert kind.read(mapped, 0, len(stamp(1))) == stamp(1)
    assert second_peer.attach(kind_name, export) is None
    assert second_peer.ask("read", 0, len(stamp(1))) == stamp(1)


def test_an_owner_that_is_killed_leaves_attached_processes_their_memory(
    kind_name: str, kind: TestedKind, export: Export, mapped: Any, owner: Peer, peer: Peer
) -> None:
    """A mapping outlives the owner, and those that have it still share it."""
    peer.attach(kind_name, export)
    kind.write(mapped, 0, stamp(1))
    owner.kill()
    assert peer.ask("read", 0, len(stamp(1))) == stamp(1)
    peer.ask("write", 0, stamp(2))
    assert kind.read(mapped, 0, len(stamp(2))) == stamp(2)


def test_a_detached_process_has_no_mapping_and_the_others_go_on(
    kind_name: str, kind: TestedKind, export: Export, mapped: Any, peer: Peer
) -> None:
    """Detaching is one side's affair, and a process can come again."""
    peer.attach(kind_name, export)
    assert peer.ask("detach") == 0
    kind.write(mapped, 0, stamp(3))
    assert kind.read(mapped, 0, len(stamp(3))) == stamp(3)
    peer.attach(kind_name, export)
    assert peer.ask("read", 0, len(stamp(3))) == stamp(3)


def test_a_mapping_cannot_be_closed_under_a_living_view(kind: TestedKind, mapped: Any) -> None:
    """[M8]: closing would turn the view's next load into a crash: it is refused until the view is gone."""
    view = kind.view(mapped)
    with pytest.raises(MappingInUse, match="live views"):
        mapped.close()
    kind.write(mapped, 0, b"open")
    del view
    mapped.close()


@pytest.mark.parametrize("kind_name", READ_ONLY, indirect=True)
def test_a_read_only_mapping_sees_what_others_write(
    kind_name: str, kind: TestedKind, export: Export, mapped: Any, peer: Peer
) -> None:
    """Reading is all that it gives up."""
    assert peer.attach(kind_name, export, writable=False) is None
    kind.write(mapped, 5, stamp(4))
    assert peer.ask("read", 5, len(stamp(4))) == stamp(4)


@pytest.mark.parametrize("kind_name", READ_ONLY, indirect=True)
def test_a_store_past_a_read_only_mapping_ends_the_process_or_context_that_tries(
    kind_name: str, kind: TestedKind, export: Export, mapped: Any, peer: Peer
) -> None:
    """Read-only is enforced by the memory itself, and nobody else feels it."""
    peer.attach(kind_name, export, writable=False)
    if kind.on_hardware:
        assert peer.ask("store").reason == "DEVICE_FAILED"
        peer.kill()
    else:
        with pytest.raises(EOFError):
            peer.ask("store")
        assert peer.process.wait(30) == -signal.SIGSEGV
    assert kind.read(mapped, 0, 1) == b"\0"


@pytest.mark.parametrize("kind_name", kinds_where(lambda kind: not kind.read_only), indirect=True)
def test_a_kind_without_read_only_mappings_refuses_to_make_one(kind_name: str, export: Export, peer: Peer) -> None:
    """No mapping is more than was asked for."""
    refusal = peer.attach(kind_name, export, writable=False)
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "ARENA_UNFIT"


def test_a_forked_child_of_an_attached_process_has_no_mapping(kind_name: str, export: Export, peer: Peer) -> None:
    """[M7]: a child could go on writing after its parent is known to be dead."""
    peer.attach(kind_name, export)
    assert peer.ask("fork") == 0


@pytest.mark.parametrize("kind_name", IN_PLACE, indirect=True)
def test_another_arena_takes_the_place_of_the_first_under_living_views(
    kind_name: str, kind: TestedKind, owner: Peer, mapped: Any, peer: Peer, second_peer: Peer
) -> None:
    """[M11]: the same mapping shows the other arena, at the same address, and the first one is let go."""
    view = kind.view(mapped)
    kind.write(mapped, 3, b"first")
    mapped.vacate()
    mapped.vacate()
    second = peer.create(kind_name, DESCRIPTOR.size_bytes)
    second_peer.attach(kind_name, second)
    second_peer.ask("write", 3, b"other")
    mapped.replace(second)
    for fd in second.fds:
        os.close(fd)
    assert kind.read(mapped, 3, 5) == b"other"
    kind.write(mapped, 3, b"again")
    assert second_peer.ask("read", 3, 5) == b"again"
    del view


def test_an_arena_of_another_size_or_kind_takes_nobodys_place(
    kind_name: str, kind: TestedKind, mapped: Any, peer: Peer
) -> None:
    """[M6] and [M11]: what was mapped is still there, and works."""
    kind.write(mapped, 3, b"first")
    other_kind = "host" if kind_name != "host" else "cuda_vmm"
    for name, size_bytes in ((kind_name, DESCRIPTOR.size_bytes // 2), (other_kind, DESCRIPTOR.size_bytes)):
        unfit = peer.create(name, size_bytes)
        with pytest.raises(ArenaUnfit):
            mapped.replace(unfit)
        for fd in unfit.fds:
            os.close(fd)
    assert kind.read(mapped, 3, 5) == b"first"
