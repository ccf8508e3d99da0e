"""Reserving a host arena: in pieces, with the room checked, stoppable."""

import os

import pytest

from contract.leaks import no_leaks
from kvharbor.gpumem import HostArena, InsufficientMemory, LayoutInvalid, ReservationCancelled

__all__ = ["no_leaks"]
pytestmark = pytest.mark.usefixtures("no_leaks")

PIECE_BYTES = 1 << 16
SIZE_BYTES = 3 * PIECE_BYTES + 4096


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvharbor.gpumem.host.PIECE_BYTES", PIECE_BYTES)


class Room:
    """Answers for the machine's memory: so many bytes, of which a reservation takes its share."""

    def __init__(self, arena: HostArena, available_bytes: int) -> None:
        self.arena = arena
        self.available_bytes = available_bytes
        self.asked: list[tuple[int, int]] = []

    def __call__(self, needed_bytes: int, headroom_bytes: int) -> None:
        self.asked.append((needed_bytes, headroom_bytes))
        left = self.available_bytes - taken_bytes(self.arena)
        if needed_bytes > left:
            raise InsufficientMemory(needed_bytes, available_bytes=left, limited_by="test")


def taken_bytes(arena: HostArena) -> int:
    return os.fstat(arena.fd).st_blocks * 512


def test_memory_is_taken_piece_by_piece_and_progress_told() -> None:
    """A large reservation shows where it is, and ends exactly at the size."""
    with HostArena.create(SIZE_BYTES) as arena:
        assert taken_bytes(arena) == 0
        told: list[int] = []
        arena.reserve(told.append)
        assert told == [PIECE_BYTES, 2 * PIECE_BYTES, 3 * PIECE_BYTES, SIZE_BYTES]
        assert taken_bytes(arena) == SIZE_BYTES


def test_without_room_nothing_is_taken() -> None:
    """fallocate does not fail for want of memory, the kernel kills: so the check comes first."""
    with HostArena.create(SIZE_BYTES) as arena:
        with pytest.raises(InsufficientMemory, match=f"needs {SIZE_BYTES} bytes .*, test leaves {SIZE_BYTES - 1}"):
            arena.reserve(check_room=Room(arena, SIZE_BYTES - 1))
        assert taken_bytes(arena) == 0


def test_the_first_check_asks_for_headroom_and_every_piece_for_the_rest() -> None:
    """Room is looked at again between pieces, since others take memory too."""
    with HostArena.create(SIZE_BYTES) as arena:
        room = Room(arena, SIZE_BYTES)
        arena.reserve(check_room=room)
        (first_needed, headroom), *later = room.asked
        assert first_needed == SIZE_BYTES
        assert headroom > 2**20
        assert later == [(SIZE_BYTES - done, 0) for done in (0, PIECE_BYTES, 2 * PIECE_BYTES, 3 * PIECE_BYTES)]


def test_room_that_vanishes_midway_stops_the_reservation_and_it_can_go_on_later() -> None:
    """What was taken stays until close; calling again continues."""
    with HostArena.create(SIZE_BYTES) as arena:
        room = Room(arena, SIZE_BYTES)

        def take_the_rest(reserved_bytes: int) -> None:
            if reserved_bytes == 2 * PIECE_BYTES:
                room.available_bytes = reserved_bytes

        with pytest.raises(InsufficientMemory):
            arena.reserve(take_the_rest, check_room=room)
        assert taken_bytes(arena) == arena.reserved_bytes == 2 * PIECE_BYTES
        arena.reserve()
        assert taken_bytes(arena) == arena.reserved_bytes == SIZE_BYTES


def test_a_reservation_can_be_cancelled_between_pieces() -> None:
    """A server that is told to stop does not first fill memory."""
    with HostArena.create(SIZE_BYTES) as arena:
        with pytest.raises(ReservationCancelled, match=f"after {PIECE_BYTES} of {SIZE_BYTES} bytes"):
            arena.reserve(cancelled=lambda: arena.reserved_bytes >= PIECE_BYTES)
        assert taken_bytes(arena) == PIECE_BYTES


def test_only_the_size_is_reserved_of_a_larger_file() -> None:
    """memory_max is address space for later growth; it costs nothing now."""
    with HostArena.create(PIECE_BYTES, memory_max_bytes=SIZE_BYTES) as arena:
        arena.reserve()
        assert os.fstat(arena.fd).st_size == SIZE_BYTES
        assert taken_bytes(arena) == PIECE_BYTES


def test_sizes_need_not_be_whole_pages() -> None:
    """The file is rounded up, the size stays what was asked for."""
    with HostArena.create(5000) as arena, arena.map() as mapping:
        arena.reserve()
        assert (arena.size_bytes, mapping.size_bytes) == (5000, 5000)
        assert os.fstat(arena.fd).st_size == 8192


def test_an_absurd_size_is_refused_by_the_room_check() -> None:
    """99 PiB is an error that names what is available; it never reaches the kernel."""
    with HostArena.create(99 * 2**50) as arena:
        with pytest.raises(InsufficientMemory, match=f"needs {99 * 2**50} bytes .*99.0 PiB.*, .* leaves "):
            arena.reserve()
        assert taken_bytes(arena) == 0


@pytest.mark.parametrize(("size_bytes", "memory_max_bytes"), [(0, None), (-1, None), (10, 9), (2**63, None)])
def test_a_size_out_of_range_is_refused(size_bytes: int, memory_max_bytes: int | None) -> None:
    """Nothing is made of an empty or an impossible arena."""
    with pytest.raises(LayoutInvalid, match="size_bytes is"):
        HostArena.create(size_bytes, memory_max_bytes=memory_max_bytes)
