"""A waiting request as the service sees it: what it may reuse, and what it needs."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from vllm.v1.request import Request, RequestStatus

from kvharbor.engines.vllm.blocks import HarborBlockPool

MOST_BLOCKS = 1 << 16
"""Of the prompts that are asked for in one call, whose message has a largest size."""


@dataclass(slots=True, eq=False)
class Candidate:
    """`keys` are those of the blocks that it may reuse, `block_count` is what it needs in all."""

    request: Request
    keys: list[bytes]
    block_count: int

    @classmethod
    def of(cls, request: Request, block_tokens: int, max_model_len: int) -> Self:
        """Returns what a request needs, with room for its first new token."""
        keys: list[bytes] = []
        if not request.skip_reading_prefix_cache:
            # One token at least is computed, for its logits.
            keys = request.block_hashes[: (request.num_tokens - 1) // block_tokens]
        tokens = min(request.num_tokens + 1, max_model_len)
        return cls(request, keys, -(-tokens // block_tokens))


def is_ready(request: Request) -> bool:
    """Whether vLLM would admit it, and it has no blocks yet."""
    if request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED) or request.num_computed_tokens:
        return False
    return not request.num_stale_output_tokens or bool(request.drop_stale_output)


class Distinct:
    """Makes candidates for one call: of those who begin alike only the first, unless that beginning is here.

    The others find what that one has computed, or what the service has of it, a little later.
    """

    def __init__(self, pool: HarborBlockPool, max_model_len: int) -> None:
        self._pool = pool
        self._max_model_len = max_model_len
        self._first_keys: set[bytes] = set()

    def candidate(self, request: Request) -> Candidate | None:
        """Returns a request as a candidate; None for one that begins as another."""
        candidate = Candidate.of(request, self._pool.hash_block_size, self._max_model_len)
        first = candidate.keys[0] if candidate.keys else None
        if first is not None:
            if first in self._first_keys and not self._pool.knows(first):
                return None
            self._first_keys.add(first)
        return candidate


def of_one_call(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Returns the first ones, no more than fit into a message; one always does."""
    taken: list[Candidate] = []
    block_count = 0
    for candidate in candidates:
        block_count += candidate.block_count
        if taken and block_count > MOST_BLOCKS:
            break
        taken.append(candidate)
    return taken


def place_count(scheduler: Any) -> int:
    """Returns how many more may run. A session that waits for more input has a place too."""
    taken = len(scheduler.running) + scheduler.num_waiting_for_streaming_input
    places: int = scheduler.max_num_active_reqs - taken
    return places
