"""Digests: published vectors, encodings without two readings, and nothing that depends on the process."""

import hashlib
import re
from pathlib import Path

import pytest
from calls import encode, new_pool, publish, span
from hypothesis import given
from hypothesis import strategies as st

from kvharbor.pool.digest import (
    DIGEST_BYTES,
    SCHEME_VERSION,
    PlaneIdentity,
    block_digest,
    encode_extra_key,
    namespace_digest,
    pool_identity,
)
from kvharbor.pool.events import BlocksStored

PLANES = (
    PlaneIdentity("k", 2, "float32", 16, "token_head_dim"),
    PlaneIdentity("v", 2, "float32", 16, "token_head_dim"),
)
IDENTITY = pool_identity("m", 1, 4, PLANES)
NAMESPACE = namespace_digest("t", IDENTITY, "", "", b"s")
PROTOCOL = Path(__file__).parents[2] / "docs" / "protocol.md"


def test_the_published_vectors_hold() -> None:
    """The table in docs/protocol.md is what the code computes, in the scheme that it names."""
    page = PROTOCOL.read_text(encoding="utf-8")
    first = block_digest(NAMESPACE, encode(span(1, 4)))
    second = block_digest(first, encode(span(5, 8)))
    marked = block_digest(NAMESPACE, encode(span(1, 4)) + encode_extra_key(1, b"img"))
    opaque = namespace_digest("t", IDENTITY, "", "", b"s", "vllm/sha256")
    computed = [one.hex() for one in (NAMESPACE, first, second, marked, opaque)]
    assert re.findall(r"\| `([0-9a-f]{64})` \|", page) == computed
    assert f"`{SCHEME_VERSION.decode()}`" in page


def test_a_namespace_digest_is_the_hash_of_its_tagged_fields() -> None:
    """The encoding, spelt out without the code: tag, length as little-endian uint64, bytes."""
    fields = (
        (b"S", SCHEME_VERSION),
        (b"t", b"t"),
        (b"I", IDENTITY),
        (b"v", b"v1"),
        (b"a", b"lora"),
        (b"s", b"salt"),
    )
    spelt = b"".join(tag + len(value).to_bytes(8, "little") + value for tag, value in fields)
    assert namespace_digest("t", IDENTITY, "v1", "lora", b"salt") == hashlib.sha256(spelt).digest()
    spelt += b"k" + len(b"vllm/sha256").to_bytes(8, "little") + b"vllm/sha256"
    assert namespace_digest("t", IDENTITY, "v1", "lora", b"salt", "vllm/sha256") == hashlib.sha256(spelt).digest()
    assert len(NAMESPACE) == DIGEST_BYTES


@pytest.mark.parametrize(
    "other",
    [
        pool_identity("n", 1, 4, PLANES),
        pool_identity("m", 2, 4, PLANES),
        pool_identity("m", 1, 8, PLANES),
        pool_identity("m", 1, 4, PLANES[:1]),
        pool_identity("m", 1, 4, PLANES[::-1]),
        pool_identity("m", 1, 4, (PLANES[0], PlaneIdentity("v", 2, "float16", 16, "token_head_dim"))),
        pool_identity("m", 1, 4, (PLANES[0], PlaneIdentity("v", 3, "float32", 16, "token_head_dim"))),
        pool_identity("m", 1, 4, (PLANES[0], PlaneIdentity("v", 2, "float32", 32, "token_head_dim"))),
        pool_identity("m", 1, 4, (PLANES[0], PlaneIdentity("v", 2, "float32", 16, "head_token_dim"))),
    ],
)
def test_whatever_changes_how_bytes_are_read_changes_the_identity(other: bytes) -> None:
    """[G1] Model, ranks, block size, planes, their order, and each field of a plane are in the key."""
    assert other != IDENTITY
    assert namespace_digest("t", other, "", "", b"s") != NAMESPACE


@given(st.lists(st.text(st.sampled_from("tvask\0\1"), max_size=3), min_size=10, max_size=10))
def test_no_two_namespaces_share_an_encoding(texts: list[str]) -> None:
    """Moving bytes from one field to its neighbour gives another digest, whatever the bytes are."""
    one, other = texts[:5], texts[5:]
    digests = {
        namespace_digest(tenant, b"", version, adapter, salt.encode(), scheme)
        for tenant, version, adapter, salt, scheme in (one, other)
    }
    assert len(digests) == len({tuple(one), tuple(other)})


def test_events_carry_the_same_digests_as_the_functions() -> None:
    """What a watcher sees can be computed by anyone from tokens and namespace."""
    pool = new_pool(4)
    publish(pool, span(1, 8))
    (event,) = pool.drain_events()
    parent = namespace_digest("t", b"", "", "", b"")
    first = block_digest(parent, encode(span(1, 4)))
    assert isinstance(event, BlocksStored)
    assert (event.parent_digest, event.digests) == (parent, (first, block_digest(first, encode(span(5, 8)))))
