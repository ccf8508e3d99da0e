"""The status page as a client maps it; the real one is in the integration tests."""

import os
import struct
from collections.abc import Iterator

import numpy as np
import pytest

from kvharbor.client import HarborClosed, ServiceBug, StatusPage

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def page_fd() -> Iterator[int]:
    """A page that a service would write."""
    fd = os.memfd_create("kvharbor-status", os.MFD_CLOEXEC)
    os.ftruncate(fd, 4096)
    yield fd
    os.close(fd)


def write(fd: int, *words: int) -> None:
    os.pwrite(fd, np.array(words, np.uint64).tobytes(), 0)


def test_words_are_read_as_they_are_now(page_fd: int) -> None:
    """In the order of side.proto, the largest included; nothing is copied when the page is mapped."""
    write(page_fd, 1, 0xE1, 2, 3, 4, 5)
    page = StatusPage("e1.1", page_fd)
    assert (page.epoch, page.revision, page.available_block_count) == (0xE1, 2, 3)
    assert (page.recall_count, page.waiting_count) == (4, 5)
    write(page_fd, 1, 2**64 - 1, 7)
    assert (page.epoch, page.revision, page.available_block_count) == (2**64 - 1, 7, 3)
    page.close()


def test_a_page_that_was_closed_is_no_crash(page_fd: int) -> None:
    """Its memory is gone; closing it again does nothing."""
    write(page_fd, 1)
    page = StatusPage("e1.1", page_fd)
    page.close()
    page.close()
    with pytest.raises(HarborClosed, match="connect again"):
        _ = page.revision


def test_a_list_of_words_that_is_not_known_is_refused(page_fd: int) -> None:
    """Another version may have other words in these places."""
    write(page_fd, 2)
    with pytest.raises(ServiceBug, match="version 2, this client knows 1"):
        StatusPage("e1.1", page_fd)


def test_the_page_cannot_be_written(page_fd: int) -> None:
    """It is mapped for reading."""
    write(page_fd, 1)
    page = StatusPage("e1.1", page_fd)
    with pytest.raises(TypeError):
        struct.pack_into("=Q", page._map, 0, 9)
    page.close()
