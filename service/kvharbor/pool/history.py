"""What a pool remembers of its past, so that it can tell why a match ended and how its blocks are used.

A pool has one if its config says so: it costs some microseconds a request, and about 140 bytes for each eviction that
is remembered. No block changes its state by it [Y4].
"""

from collections.abc import Iterable, Sequence
from typing import Final

from kvharbor.pool.evicted import EvictedContents, Eviction
from kvharbor.pool.namespaces import Namespace
from kvharbor.pool.traffic import Traffic

_REMEMBERED: Final = 1 << 16
"""Of a large pool as many evictions are remembered, of a small one as many as it has blocks."""


class History:
    """What was evicted, and a sample of what blocks are used for."""

    def __init__(self, block_count: int) -> None:
        self.evicted = EvictedContents(min(block_count, _REMEMBERED))
        self.traffic = Traffic()

    def gave_up(
        self,
        blocks: Sequence[int],
        removed: Iterable[tuple[Namespace, Iterable[bytes]]],
        eviction: Eviction,
        *,
        is_eviction: bool,
    ) -> None:
        """Blocks have left the index; `removed` are their contents by namespace.

        Those that were retired are remembered as evicted, but say nothing about how blocks are used [V5].
        """
        if is_eviction:
            self.traffic.evicted(blocks, eviction.at)
        else:
            self.traffic.retired(blocks)
        for namespace, digests in removed:
            # Nobody asks for the reason of a miss by an opaque key, which is of no tenant either [Y2].
            if not namespace.is_opaque:
                self.evicted.remember(digests, eviction)
