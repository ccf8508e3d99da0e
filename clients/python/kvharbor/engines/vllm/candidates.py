"""A waiting request as the service sees it: what it may reuse, and what it needs."""

from dataclasses import dataclass
from typing import Self

from vllm.v1.request import Request, RequestStatus


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
