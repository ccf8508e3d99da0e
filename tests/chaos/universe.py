"""A pool, and what is asked of it: prompts that share prefixes, a few of them often and most of them seldom.

All workers draw from one universe, so most allocations find blocks that others have written, and two workers often
compute the same content at the same time.
"""

import random
from itertools import accumulate

from chaos.stamps import BLOCK_TOKENS, LAYOUT

POOL = "chaos"
# Less than the workers want to hold and far less than all documents have: something is evicted all the time.
_BLOCK_COUNT = 72
POOL_BYTES = (_BLOCK_COUNT + LAYOUT.scratch_blocks) * LAYOUT.block_bytes
MOST_TOKENS = 6 * BLOCK_TOKENS
_DOCUMENTS = 12
_ENDINGS = 2
_NEXT_TOKENS = 2
# Zipf's law: the n-th document is asked for 1/n as often as the first.
_WEIGHTS = list(accumulate(1 / (rank + 1) for rank in range(_DOCUMENTS)))


def prompt(chance: random.Random) -> list[int]:
    """Returns one of the documents, some cut short and continued in one of few ways."""
    document = chance.choices(range(_DOCUMENTS), cum_weights=_WEIGHTS)[0]
    length, ending = chance.randint(1, MOST_TOKENS), chance.randrange(_ENDINGS)
    cut = chance.choice((MOST_TOKENS, chance.randint(0, MOST_TOKENS)))
    return [1000 * (document if place < cut else 100 + ending) + place for place in range(length)]


def generated(chance: random.Random, most: int) -> list[int]:
    """Returns up to so many tokens as a model may have sampled them; forks often sample the same."""
    return [500_000 + chance.randrange(_NEXT_TOKENS)] * chance.randint(0, most)
