"""How a pool stands, in memory that is shared with the service: read without a call (see StatusAttached)."""

import mmap
import os
from typing import Self

from kvharbor.client.errors import HarborClosed, ServiceBug
from kvharbor.client.side import SideSocket

VERSION = 1
_WORD_BYTES = 8
_WORD_COUNT = 6


class StatusPage:
    """Words that the service writes and this process reads. They do not change together.

    The page stays through a restart of the service's process, in which it stands still; a new epoch has another one.
    """

    def __init__(self, pool_id: str, fd: int) -> None:
        self.pool_id = pool_id
        self._map = mmap.mmap(fd, _WORD_COUNT * _WORD_BYTES, mmap.MAP_SHARED, mmap.PROT_READ)
        self._words = memoryview(self._map).cast("Q")
        if self._word(0) != VERSION:
            found = self._word(0)
            self.close()
            raise ServiceBug(f"the status page has version {found}, this client knows {VERSION}")

    @classmethod
    def attach(cls, side: SideSocket, pool_id: str) -> Self:
        """Asks for the page of a pool on the side socket and maps it."""
        fd = side.attach_status(pool_id)
        try:
            return cls(pool_id, fd)
        finally:
            os.close(fd)

    @property
    def epoch(self) -> int:
        """The epoch, its digits read as a hexadecimal number."""
        return self._word(1)

    @property
    def revision(self) -> int:
        """Rises with every change of the pool."""
        return self._word(2)

    @property
    def available_block_count(self) -> int:
        """Blocks to be had: free and cached ones, less what is promised."""
        return self._word(3)

    @property
    def recall_count(self) -> int:
        """Recalls so far."""
        return self._word(4)

    @property
    def waiting_count(self) -> int:
        """Calls that wait for room."""
        return self._word(5)

    def close(self) -> None:
        """Unmaps it; reading then raises HarborClosed."""
        self._words.release()
        self._map.close()

    def _word(self, index: int) -> int:
        try:
            return self._words[index]
        except ValueError:
            raise HarborClosed("the harbor is closed, and its status pages with it: connect again") from None
