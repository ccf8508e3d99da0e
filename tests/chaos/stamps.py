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
from kvharbor.gpumem import DataType, Layout

BLOCK_TOKENS = 16
LAYOUT = Layout.attention("chaos@1", layers=2, kv_heads=2, head_dim=16, data_type=DataType.UINT8, block_tokens=16)
_PARTS = tuple((plane.name, layer) for plane in LAYOUT.planes for layer in range(plane.layer_count))
_PART_SHAPE = (LAYOUT.planes[0].head_count, LAYOUT.planes[0].head_dim)
_TOKEN_BYTES = len(_PARTS) * _PART_SHAPE[0] * _PART_SHAPE[1]
_KEY = b"kvharbor chaos"

Bytes = npt.NDArray[np.uint8]


Slots = tuple[npt.NDArray[Any], npt.NDArray[np.int64]]
"""Block and place in it of each token."""


@dataclass(frozen=True, slots=True)
class Wrong:
    """The first byte that is not what it must be."""

    block_id: int
    token: int
    plane: str
    layer: int
    expected: str
    seen: str


def stamps(tokens: Sequence[int], variant: str = "") -> Bytes:
    """Returns what every token's KV must be, `[token, part, head, dim]`; a part is one layer of one plane.

    `variant` stands for the weights and whatever else namespaces tell apart: no two of them have the same bytes.
    """
    chain = hashlib.shake_128(_KEY + variant.encode())
    streams = bytearray()
    for token in tokens:
        chain.update(struct.pack("<I", token))
        streams += chain.copy().digest(_TOKEN_BYTES)
    return np.frombuffer(bytes(streams), np.uint8).reshape(len(tokens), len(_PARTS), *_PART_SHAPE)


def slots(block_ids: Sequence[int] | npt.NDArray[Any], first: int, end: int) -> Slots:
    """Returns where tokens [first, end) of a table are."""
    entries, offsets = np.divmod(np.arange(first, end), BLOCK_TOKENS)
    return np.asarray(block_ids, np.int64)[entries], offsets


def write(pool: Pool, places: Slots, values: Bytes) -> None:
    """Writes the KV of a token into each of the places."""
    for part, (plane, layer) in enumerate(_PARTS):
        pool.views.numpy(plane, layer)[places] = values[:, part]


def verify(pool: Pool, places: Slots, expected: Bytes) -> Wrong | None:
    """Compares the KV in the places with what it must be; returns the first difference."""
    seen = np.empty_like(expected)
    for part, (plane, layer) in enumerate(_PARTS):
        seen[:, part] = pool.views.numpy(plane, layer)[places]
    if np.array_equal(expected, seen):
        return None
    token, part = (int(place) for place in np.argwhere((expected != seen).any(axis=(2, 3)))[0])
    plane, layer = _PARTS[part]
    return Wrong(int(places[0][token]), token, plane, layer, _shown(expected[token, part]), _shown(seen[token, part]))


def _shown(values: npt.NDArray[Any]) -> str:
    return values.tobytes()[:8].hex()
