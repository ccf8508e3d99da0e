"""The offline optimum (MIN): the hits of somebody who knows what will be asked for.

It gives up the block whose next use is furthest. Whoever asks for a block asks for all before it too, so a parent's
next use is never after its child's, and no block is left behind without the ones before it.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

from kvharbor.server.traces.trace import Request

_ABSENT = -1


class OfflineOptimum:
    """Memory that is run by foresight. Requests are admitted in the order that it was made with.

    Its cached blocks, those that nobody holds, lie in a queue for each request: the one that uses them next. Blocks
    come into a queue children before parents, as a parent is let go after its children, or with them and then last;
    so a queue is in the order of eviction. They leave it for being evicted, or all at once with that request.
    """

    def __init__(self, requests: Sequence[Request], block_count: int) -> None:
        self._requests = requests
        self._next_uses = _next_uses(requests)
        self._free_count = block_count
        self._cached_count = 0
        self.evicted_block_count = 0
        name_count = 1 + max((max(request.block_names, default=-1) for request in requests), default=-1)
        self._holders = [_ABSENT] * name_count
        # Of blocks that are there: the next request that asks for it, behind all that were admitted.
        self._next_use = [0] * name_count
        self._cached: dict[int, deque[int]] = {}
        # The keys of `_cached`, negated as the greatest comes first; and some that are there no more.
        self._furthest: list[int] = []
        self._output_counts: dict[int, int] = {}

    def admit(self, index: int, request: Request, output_block_count: int) -> int | None:
        """Holds what is there and makes room for the rest."""
        holders, names = self._holders, request.block_names
        matched = next((place for place, name in enumerate(names) if holders[name] == _ABSENT), len(names))
        revived_count = len(self._cached.get(index, ()))
        fresh_count = len(names) - matched + output_block_count
        if fresh_count > self._free_count + self._cached_count - revived_count:
            return None
        self._cached.pop(index, None)
        self._cached_count -= revived_count
        self._make_free(fresh_count)
        self._free_count -= fresh_count
        for name in names[:matched]:
            holders[name] += 1
        for name in names[matched:]:
            holders[name] = 1
        for name, following in zip(names, self._next_uses[index], strict=True):
            self._next_use[name] = following
        self._output_counts[index] = output_block_count
        return matched

    def release(self, index: int) -> None:
        """Lets go of a request's blocks, the deepest first."""
        holders, next_use, cached = self._holders, self._next_use, self._cached
        self._free_count += self._output_counts.pop(index)
        for name in reversed(self._requests[index].block_names):
            holders[name] -= 1
            if holders[name]:
                continue
            following = next_use[name]
            queue = cached.get(following)
            if queue is None:
                queue = cached[following] = deque()
                heappush(self._furthest, -following)
            queue.append(name)
            self._cached_count += 1

    def _make_free(self, block_count: int) -> None:
        """Evicts as many as are short."""
        short = block_count - self._free_count
        while short > 0:
            queue = self._cached.get(-self._furthest[0])
            if not queue:
                self._cached.pop(-heappop(self._furthest), None)
                continue
            victim_count = min(short, len(queue))
            for _ in range(victim_count):
                self._holders[queue.popleft()] = _ABSENT
            self._cached_count -= victim_count
            self._free_count += victim_count
            self.evicted_block_count += victim_count
            short -= victim_count


def _next_uses(requests: Sequence[Request]) -> list["array[int]"]:
    """Returns, for each block of each request, the index of the next request with it; past the end if none has."""
    next_use: dict[int, int] = {}
    never = len(requests)
    found = []
    for index in range(len(requests) - 1, -1, -1):
        names = requests[index].block_names
        found.append(array("I", [next_use.get(name, never) for name in names]))
        next_use.update(dict.fromkeys(names, index))
    found.reverse()
    return found
