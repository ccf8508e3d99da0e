"""Public names of namespaces and blocks: chained SHA-256, the same in every process and language.

Matching never depends on these; they name blocks outside the pool. Scheme version 1, test vectors in
docs/protocol.md. A string is UTF-8; every field is one tag byte, its length as a little-endian uint64, its
bytes; so no two lists of fields share an encoding. A block of an opaque namespace is named by its key, and nothing
is hashed.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

SCHEME_VERSION: Final = b"kvharbor-digest-1"
DIGEST_BYTES: Final = 32
OPAQUE_KEY_BYTES: Final = DIGEST_BYTES
"""What a block of an opaque namespace is known by: content and digest in one."""


@dataclass(frozen=True, slots=True)
class PlaneIdentity:
    """What a plane contributes to the identity of a pool."""

    name: str
    layer_count: int
    data_type: str
    page_bytes: int
    interior: str


@dataclass(frozen=True, slots=True)
class ExtraKey:
    """Tells the token at `token_offset` (from the start of the sequence) apart from equal ids elsewhere."""

    token_offset: int
    value: bytes


def _field(tag: bytes, value: bytes | str | int) -> bytes:
    if isinstance(value, str):
        value = value.encode()
    elif isinstance(value, int):
        value = value.to_bytes(8, "little")
    return tag + len(value).to_bytes(8, "little") + value


def pool_identity(model: str, tp_size: int, block_tokens: int, planes: Iterable[PlaneIdentity]) -> bytes:
    """Encodes what a pool's blocks mean: same tokens in pools of different identity never share a digest."""
    encoded = [_field(b"m", model), _field(b"r", tp_size), _field(b"b", block_tokens)]
    for plane in planes:
        parts = (
            _field(b"n", plane.name),
            _field(b"l", plane.layer_count),
            _field(b"d", plane.data_type),
            _field(b"g", plane.page_bytes),
            _field(b"i", plane.interior),
        )
        encoded.append(_field(b"p", b"".join(parts)))
    return b"".join(encoded)


def namespace_digest(tenant: str, identity: bytes, version: str, adapter: str, salt: bytes, scheme: str = "") -> bytes:
    """Names a namespace: the parent of every first block in it.

    `scheme` says how the keys of an opaque namespace are computed; an exact one has none.
    """
    parts = [
        _field(b"S", SCHEME_VERSION),
        _field(b"t", tenant),
        _field(b"I", identity),
        _field(b"v", version),
        _field(b"a", adapter),
        _field(b"s", salt),
    ]
    if scheme:
        parts.append(_field(b"k", scheme))
    return hashlib.sha256(b"".join(parts)).digest()


def encode_extra_key(offset_in_block: int, value: bytes) -> bytes:
    """Encodes an extra key as part of its block's content: offset and length as uint64, bytes."""
    return offset_in_block.to_bytes(8, "little") + len(value).to_bytes(8, "little") + value


def block_digest(parent_digest: bytes, content: bytes) -> bytes:
    """Names a block of an exact namespace by its content: tokens as little-endian uint32, then encoded extra keys."""
    return hashlib.sha256(parent_digest + content).digest()


def decode_extra_keys(encoded: bytes, first_token: int) -> list[ExtraKey]:
    """Returns the extra keys that a block's content ends with; `first_token` is the block's first one."""
    keys = []
    while encoded:
        offset, size = int.from_bytes(encoded[:8], "little"), int.from_bytes(encoded[8:16], "little")
        keys.append(ExtraKey(first_token + offset, encoded[16 : 16 + size]))
        encoded = encoded[16 + size :]
    return keys


def join_fields(*fields: bytes) -> bytes:
    """Encodes a list of byte strings, each behind its length as a little-endian uint32."""
    return b"".join(len(field).to_bytes(4, "little") + field for field in fields)


def split_fields(joined: bytes) -> list[bytes]:
    """Decodes what `join_fields` made."""
    fields = []
    while joined:
        size = int.from_bytes(joined[:4], "little")
        fields.append(joined[4 : 4 + size])
        joined = joined[4 + size :]
    return fields
