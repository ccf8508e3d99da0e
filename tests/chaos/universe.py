"""A pool, and what is asked of it: prompts that share prefixes, a few of them often and most of them seldom.

All workers draw from one universe, so most allocations find blocks that others have written, and two workers often
compute the same content at the same time. Engines with own tables ask for the same prompts, by tokens where sequences
have them too, and by opaque keys, which are the same in two schemes and must not meet.
"""

import hashlib
import random
from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np

from chaos.stamps import BLOCK_TOKENS, LAYOUT
from kvharbor.client import Namespace
from kvharbor.pool.digest import namespace_digest
from kvharbor.server.messages.layouts import identity_of

POOL = "chaos"
# Less than the workers want to hold and far less than all documents have: something is evicted all the time.
_BLOCK_COUNT = 72
POOL_BYTES = (_BLOCK_COUNT + LAYOUT.scratch_blocks) * LAYOUT.block_bytes
MOST_TOKENS = 6 * BLOCK_TOKENS
SCHEMES = ("", "chaos/a", "chaos/b")
VERSIONS = ("v1", "v2")
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
    return [next_token(chance)] * chance.randint(0, most)


def next_token(chance: random.Random) -> int:
    """Returns a token as a model may have sampled it."""
    return 500_000 + chance.randrange(_NEXT_TOKENS)


def whole_blocks(chance: random.Random) -> list[int]:
    """Returns a prompt of whole blocks."""
    while not (block_count := len(tokens := prompt(chance)) // BLOCK_TOKENS):
        pass
    return tokens[: block_count * BLOCK_TOKENS]


def next_block(chance: random.Random) -> list[int]:
    """Returns a block of tokens as a model may have sampled them."""
    return [next_token(chance)] * BLOCK_TOKENS


def variant(namespace: Namespace) -> str:
    """Returns what the stamps of a namespace's blocks differ by; those that sequences have are of the empty one."""
    return f"{namespace.version}/{namespace.scheme}".strip("/")


def keys(tokens: Sequence[int], version: str) -> bytes:
    """Returns the opaque key of each whole block, whatever the scheme."""
    chain = hashlib.sha256(version.encode())
    found = b""
    for first in range(0, len(tokens), BLOCK_TOKENS):
        chain.update(np.array(tokens[first : first + BLOCK_TOKENS], "<u4").tobytes())
        found += chain.digest()
    return found


def roots(tenant: str, versions: Iterable[str]) -> set[bytes]:
    """Returns the digests of the namespaces of versions, each the parent of its first blocks."""
    identity = identity_of(LAYOUT)
    return {namespace_digest(tenant, identity, version, "", b"", scheme) for version in versions for scheme in SCHEMES}
