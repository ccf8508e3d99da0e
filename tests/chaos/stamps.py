"""The bytes of a token, derived from it and from everything before it, and their verification in place.

Every plane and layer of a token is filled from one keyed hash stream over the whole chain up to it. So the bytes of
another prefix, another content, another layer or another generation of a block never look right.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvharbor.client import Pool
from kvharbor.client import Sequence as PoolSequence
from kvharbor.gpumem import DataType, Layout

BLOCK_TOKENS = 16
LAYOUT = Layout.attention("chaos@1", layers=2, kv_heads=2, head_dim=16, data_type=DataType.UINT8, block_tokens=16)
_PARTS = tuple((plane.name, layer) for plane in LAYOUT.planes for layer in range(plane.layer_count))
_PART_SHAPE = (LAYOUT.planes[0].head_count, LAYOUT.planes[0].head_dim)
_TOKEN_BYTES = len(_PARTS) * _PART_SHAPE[0] * _PART_SHAPE[1]
_KEY = b"kvharbor chaos"

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Wrong:
    """The first byte that is not what it must be."""

    sequence_id: str
    block_id: int
    generation: int
    token: int
    plane: str
    layer: int
    expected: str
    seen: str


def stamps(tokens: Sequence[int]) -> Bytes:
    """Returns what every token's KV must be, `[token, part, head, dim]`; a part is one layer of one plane."""
    chain = hashlib.shake_128(_KEY)
    streams = bytearray()
    for token in tokens:
        chain.update(struct.pack("<I", token))
        streams += chain.copy().digest(_TOKEN_BYTES)
    return np.frombuffer(bytes(streams), np.uint8).reshape(len(tokens), len(_PARTS), *_PART_SHAPE)


def write(pool: Pool, sequence: PoolSequence, first: int, end: int, tokens: Sequence[int]) -> None:
    """Writes the KV of tokens [first, end); `tokens` are the sequence's from its start."""
    slots = sequence.slots(first, end)
    fresh = stamps(tokens[:end])[first:]
    for part, (plane, layer) in enumerate(_PARTS):
        pool.views.numpy(plane, layer)[slots] = fresh[:, part]


def verify(pool: Pool, sequence: PoolSequence, tokens: Sequence[int]) -> Wrong | None:
    """Compares all tokens that count as computed with what they must be; returns the first difference."""
    end = sequence.computed_tokens
    expected = stamps(tokens[:end])
    seen = np.empty_like(expected)
    slots = sequence.slots(0, end)
    for part, (plane, layer) in enumerate(_PARTS):
        seen[:, part] = pool.views.numpy(plane, layer)[slots]
    if np.array_equal(expected, seen):
        return None
    return _first_difference(sequence, expected, seen)


def _first_difference(sequence: PoolSequence, expected: Bytes, seen: Bytes) -> Wrong:
    token, part = (int(place) for place in np.argwhere((expected != seen).any(axis=(2, 3)))[0])
    position = token // BLOCK_TOKENS
    plane, layer = _PARTS[part]
    return Wrong(
        sequence.id,
        int(sequence.table[position]),
        int(sequence.generations[position]),
        token,
        plane,
        layer,
        _shown(expected[token, part]),
        _shown(seen[token, part]),
    )


def _shown(values: npt.NDArray[Any]) -> str:
    return values.tobytes()[:8].hex()
