"""Sequences for a decode batch, and what its commits have told a `FakeService` of them."""

from typing import Any

import numpy as np

from fake_service import FakeService
from kvharbor.client import Pool, Sequence


def prefilled(pool: Pool, token_count: int, **options: Any) -> Sequence:
    """Returns a sequence whose tokens are all computed."""
    sequence = pool.allocate(range(token_count), **options)
    sequence.commit(token_count)
    return sequence


def tokens_of(service: FakeService, sequence: Sequence) -> list[int]:
    """The tokens that commits on the stream have named for a sequence, by where they belong."""
    told: dict[int, int] = {}
    for request in service.blocks.of_kind("commit"):
        for item in request.items:
            if item.sequence_id == sequence.id:
                new = np.frombuffer(item.new_token_ids, "<u4").tolist()
                told.update(zip(range(item.known_token_count, item.known_token_count + len(new)), new, strict=True))
    return [told[position] for position in sorted(told)]
