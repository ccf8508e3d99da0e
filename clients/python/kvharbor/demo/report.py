"""What the demonstration has shown, as numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Served:
    """One request as it was answered, by one worker."""

    worker: str
    question: str
    answer: str
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    reused_tokens: int
    computed_tokens: int
    ttft_s: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The run in the form that `kvharbor demo --json` prints.

    `ttft_cold_s` and `ttft_warm_s` are medians over the requests that reused nothing and something.
    `kv_bytes_shared` is what the pool holds after the run; `kv_bytes_private` is what prefix caches of the
    same blocks would hold if each worker had its own. `identical_answers` counts the answers that are token
    for token those of the model without any cache.
    """

    workers: int
    requests: int
    prompt_tokens: int
    reused_tokens: int
    computed_tokens: int
    ttft_cold_s: float
    ttft_warm_s: float
    kv_bytes_shared: int
    kv_bytes_private: int
    identical_answers: int


def summarise(
    served: Sequence[Served], *, block_tokens: int, block_bytes: int, kv_bytes_shared: int, identical_answers: int
) -> Summary:
    """Adds up a run."""
    workers = {one.worker for one in served}
    private_blocks = sum(
        len(_whole_blocks([one for one in served if one.worker == worker], block_tokens)) for worker in workers
    )
    return Summary(
        workers=len(workers),
        requests=len(served),
        prompt_tokens=sum(len(one.prompt_ids) for one in served),
        reused_tokens=sum(one.reused_tokens for one in served),
        computed_tokens=sum(one.computed_tokens for one in served),
        ttft_cold_s=median(one.ttft_s for one in served if not one.reused_tokens),
        ttft_warm_s=median(one.ttft_s for one in served if one.reused_tokens),
        kv_bytes_shared=kv_bytes_shared,
        kv_bytes_private=private_blocks * block_bytes,
        identical_answers=identical_answers,
    )


def _whole_blocks(served: Sequence[Served], block_tokens: int) -> set[tuple[int, ...]]:
    """The distinct whole blocks of these requests, each named by its prefix."""
    blocks = set()
    for one in served:
        # The last answer token was chosen and never computed.
        tokens = one.prompt_ids + one.answer_ids[:-1]
        blocks |= {tokens[:end] for end in range(block_tokens, len(tokens) + 1, block_tokens)}
    return blocks
