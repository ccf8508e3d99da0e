"""What the service refuses extra keys for, as far as another process of it must not be told of them [C11]."""

from collections import Counter
from collections.abc import Iterable

from kvharbor.client.errors import InvalidField
from kvharbor.v1 import types_pb2

MAX_KEYS = 1 << 14
MAX_VALUE_BYTES = 256
KEY_BYTES = 16
"""What each costs beside its value."""
BYTES_A_TOKEN = 64
LEAST_BYTES = 4096
"""Extra keys of one block may have so many, or as many as its tokens allow."""


def keys_refusal(
    keys: Iterable[types_pb2.ExtraKey],
    earlier: Iterable[types_pb2.ExtraKey],
    tokens: tuple[int, int],
    block_tokens: int,
) -> InvalidField | None:
    """Returns what the service would refuse the keys of new tokens with; `earlier` has those of the tokens before."""
    keys = [*keys]
    if not keys:
        return None
    offsets = [key.token_offset for key in keys]
    if offsets != sorted(offsets) or offsets[0] < tokens[0] or offsets[-1] >= tokens[1]:
        limit, remedy = f"in order within [{tokens[0]}, {tokens[1]})", "sort them, and count from the sequence's start"
        return InvalidField.of("extra_keys.token_offset", offsets, limit=limit, remedy=remedy)
    lengths = [len(key.value) for key in keys]
    if min(lengths) < 1 or max(lengths) > MAX_VALUE_BYTES:
        limit = f"1 to {MAX_VALUE_BYTES} bytes"
        return InvalidField.of("extra_keys.value", lengths, limit=limit, remedy="use a content hash")
    sizes: Counter[int] = Counter()
    for key in (*earlier, *keys):
        sizes[key.token_offset // block_tokens] += KEY_BYTES + len(key.value)
    most = max(BYTES_A_TOKEN * block_tokens, LEAST_BYTES)
    if len(keys) > MAX_KEYS or max(sizes.values()) > most:
        limit = f"{MAX_KEYS} a commit, of {most} bytes in a block"
        return InvalidField.of("extra_keys", len(keys), limit=limit, remedy="hash the keys of a block together")
    return None
