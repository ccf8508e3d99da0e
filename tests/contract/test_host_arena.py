"""What only the host arena promises: a sealed memfd, and refusals in place of a later SIGBUS."""

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from contract.leaks import open_descriptors
from kvharbor.gpumem import (
    ArenaClosed,
    ArenaKind,
    ArenaUnfit,
    BlockViews,
    DataType,
    Export,
    HostArena,
    Layout,
    Mapping,
    MappingInUse,
)

SIZE_BYTES = 1 << 16
DESCRIPTOR = Layout.attention("m", 3, 2, 8, DataType.FLOAT16, 16).descriptor(6)


def exported(fd: int, size_bytes: int = SIZE_BYTES) -> Export:
    return Export(ArenaKind.HOST, size_bytes, fds=(fd,))


@pytest.fixture
def arena(_leave_nothing_behind: None) -> Iterator[HostArena]:
    with HostArena.create(SIZE_BYTES) as created:
        created.reserve()
        yield created


@pytest.mark.parametrize("size_bytes", [0, SIZE_BYTES // 2, SIZE_BYTES * 2])
def test_nobody_can_resize_an_arena(arena: HostArena, size_bytes: int) -> None:
    """A client that shrank it would kill every other one by SIGBUS."""
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, size_bytes)


def test_a_client_cannot_seal_an_arena_against_writing(arena: HostArena) -> None:
    """F_SEAL_FUTURE_WRITE by one client would bar all that come later."""
    f_seal_future_write = 0x10
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena.fd, fcntl.F_ADD_SEALS, f_seal_future_write)


def test_a_reserved_arena_has_all_its_pages(arena: HostArena) -> None:
    """No later touch can fail for want of memory."""
    assert os.fstat(arena.fd).st_blocks * 512 == SIZE_BYTES


def test_a_file_shorter_than_the_mapping_is_refused(arena: HostArena) -> None:
    """It would be mapped without complaint and be a SIGBUS at the first touch of the missing part."""
    with pytest.raises(ArenaUnfit, match=f"cannot map {SIZE_BYTES + 1} bytes .* it has {SIZE_BYTES}"):
        Mapping.attach(exported(arena.fd, SIZE_BYTES + 1))


def _unsealed(_folder: Path) -> int:
    fd = os.memfd_create("kvharbor-unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE_BYTES)
    return fd


def _on_disk(folder: Path) -> int:
    fd = os.open(folder / "arena", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    os.ftruncate(fd, SIZE_BYTES)
    return fd


@pytest.mark.parametrize(("make", "cause"), [(_unsealed, "not sealed against shrinking"), (_on_disk, "not a memfd")])
def test_a_file_that_can_shrink_is_refused(make: Callable[[Path], int], cause: str, tmp_path: Path) -> None:
    """Only a sealed memfd keeps its size whatever its other holders do."""
    fd = make(tmp_path)
    try:
        # A tmpfs may answer for its seals too; either refusal is right for a file on disk.
        with pytest.raises(ArenaUnfit, match=f"{cause}|not sealed"):
            Mapping.attach(exported(fd))
    finally:
        os.close(fd)


def test_a_descriptor_for_reading_maps_read_only_and_is_refused_for_writing(arena: HostArena) -> None:
    """The refusal is an error at attach, not a SIGSEGV at the first store."""
    fd = os.open(f"/proc/self/fd/{arena.fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        with pytest.raises(ArenaUnfit, match="does not allow this mapping to write"):
            Mapping.attach(exported(fd))
        with Mapping.attach(exported(fd), writable=False) as mapping:
            assert mapping.buffer.readonly is True
    finally:
        os.close(fd)


def test_a_mapping_outlives_the_descriptor_it_was_made_from(arena: HostArena) -> None:
    """No descriptor is kept, so that replacing the memory later frees the old one."""
    descriptors = open_descriptors()
    with arena.map() as mapping:
        assert open_descriptors() == descriptors
        arena.close()
        mapping.buffer[0] = 1
        assert mapping.buffer[0] == 1


def test_a_closed_arena_and_a_closed_mapping_say_so(arena: HostArena) -> None:
    """Closing twice is nothing; using what is closed is a typed error."""
    mapping = arena.map()
    for _ in range(2):
        mapping.close()
        arena.close()
    with pytest.raises(ArenaClosed, match="mapping is closed"):
        _ = mapping.buffer
    with pytest.raises(ArenaClosed, match="arena is closed"):
        arena.map()


def test_a_descriptor_that_is_not_open_is_the_systems_own_error() -> None:
    """A wrong number is a bug of the caller's; it is not dressed up as an unfit arena."""
    with pytest.raises(OSError, match="Bad file descriptor") as raised:
        Mapping.attach(exported(1 << 20))
    assert raised.value.errno == errno.EBADF


def test_numpy_and_torch_views_are_the_same_memory_without_a_copy(arena: HostArena) -> None:
    """A store through one view is read through every other, and through the raw page."""
    with arena.map() as mapping:
        views = BlockViews(mapping, DESCRIPTOR)
        array, tensor = views.numpy("v", 2), views.torch("v", 2)
        array[3, 5, 1, :] = 1.5
        assert tensor[3, 5, 1].tolist() == [1.5] * 8
        tensor[3, 5, 0] = 2.5
        assert array[3, 5, 0].tolist() == [2.5] * 8
        assert views.page("v", 2, 3).tobytes() == array[3].tobytes()
        assert (tensor.shape, array.shape) == ((6, 16, 2, 8), (6, 16, 2, 8))
        del array, tensor
        views.close()


@pytest.mark.parametrize("make_view", [BlockViews.numpy, BlockViews.torch])
def test_a_mapping_cannot_be_closed_under_an_array_or_a_tensor(make_view: object, arena: HostArena) -> None:
    """M8: what is left of the views keeps it, after they themselves are closed."""
    with arena.map() as mapping:
        views = BlockViews(mapping, DESCRIPTOR)
        view = make_view(views, "k", 0)  # type: ignore[operator]
        views.close()
        with pytest.raises(MappingInUse, match="live views"):
            mapping.close()
        view[1] = 1
        del view


def test_a_read_only_mapping_gives_read_only_arrays(arena: HostArena) -> None:
    """It sees what others write, and numpy refuses a store before the memory does."""
    with arena.map() as writer, arena.map(writable=False) as mapping:
        views, reader = BlockViews(writer, DESCRIPTOR), BlockViews(mapping, DESCRIPTOR)
        views.numpy("k", 1)[2] = 4
        assert set(reader.numpy("k", 1)[2].ravel().tolist()) == {4.0}
        assert set(reader.torch("k", 1)[2].ravel().tolist()) == {4.0}
        for array in (reader.numpy("k", 1), reader.page("k", 1, 2), reader.numpy_run("k", 1, 2, 1)):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1
        del array
        views.close()
        reader.close()


@pytest.mark.parametrize(
    "export",
    [Export(ArenaKind.CUDA_IPC, SIZE_BYTES), Export(ArenaKind.HOST, SIZE_BYTES), Export(ArenaKind.HOST, 0, fds=(0,))],
    ids=["another kind", "no descriptor", "no bytes"],
)
def test_an_export_that_is_not_a_host_arenas_is_refused(export: Export) -> None:
    """What a process is sent is checked before it is mapped."""
    with pytest.raises(ArenaUnfit):
        Mapping.attach(export)


def test_another_arena_takes_the_place_of_the_first_under_living_views(arena: HostArena) -> None:
    """M11: the same array at the same address shows placeholder zeros, then the other arena; the first is let go."""
    with HostArena.create(SIZE_BYTES, name="kvharbor-second") as second, arena.map() as mapping:
        with second.map() as writer:
            writer.buffer[5] = 9
        view = np.frombuffer(mapping.buffer, np.uint8)
        address = view.ctypes.data
        view[5] = 7
        mapping.vacate()
        assert view[5] == 0
        assert not any("kvharbor" in line for line in _lines_at(address))
        view[5] = 1
        mapping.replace(second.export())
        assert (view[5], view.ctypes.data) == (9, address)
        assert all("kvharbor-second" in line for line in _lines_at(address))
        assert "dc" in _flags_at(address)
        view[6] = 4
        with second.map() as reader:
            assert reader.buffer[6] == 4
        del view


def test_an_unfit_arena_takes_nobodys_place(arena: HostArena) -> None:
    """M6 and M11: what is mapped stays mapped; a closed mapping has no place."""
    with HostArena.create(SIZE_BYTES // 2, name="kvharbor-short") as short, arena.map() as mapping:
        mapping.buffer[5] = 7
        with pytest.raises(ArenaUnfit):
            mapping.replace(exported(short.fd))
        assert mapping.buffer[5] == 7
    for place in (mapping.vacate, lambda: mapping.replace(exported(arena.fd))):
        with pytest.raises(ArenaClosed):
            place()


def test_a_read_only_mapping_stays_one_in_another_place(arena: HostArena) -> None:
    """Whether stores are allowed belongs to the mapping."""
    with HostArena.create(SIZE_BYTES, name="kvharbor-second") as second, arena.map(writable=False) as mapping:
        address = np.frombuffer(mapping.buffer, np.uint8).ctypes.data
        mapping.vacate()
        mapping.replace(second.export())
        assert mapping.buffer.readonly
        assert all(" r--s " in line for line in _lines_at(address))


def _lines_at(address: int) -> list[str]:
    """What /proc/self/maps has at an address."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, end = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= address < end:
            found.append(line)
    assert found
    return found


def _flags_at(address: int) -> list[str]:
    """The kernel's flags of the memory at an address; "dc": not copied by a fork."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    start = next(
        number
        for number, line in enumerate(lines)
        if line.split()[0].count("-") == 1
        and not line.split()[0].endswith(":")
        and int(line.split()[0].split("-")[0], 16) <= address < int(line.split()[0].split("-")[1], 16)
    )
    return next(line.split()[1:] for line in lines[start:] if line.startswith("VmFlags:"))
