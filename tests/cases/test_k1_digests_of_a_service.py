"""K1, the service's half: the same digest in every process, and after a restart."""

import hashlib
import os
import struct

import pytest

from conftest import StartService
from kvharbor.v1 import cache_service_pb2 as cache
from kvharbor.v1 import types_pb2
from raw_caller import BLOCK_BYTES, BLOCK_TOKENS, RawCaller, tokens
from service_process import ServiceProcess

pytestmark = pytest.mark.slow

PROMPT = tuple(range(1, 2 * BLOCK_TOKENS + 1))
NAMESPACE = types_pb2.NamespaceKey(salt=b"s")


def field(tag: bytes, value: bytes) -> bytes:
    """Encodes a field as docs/protocol.md says: tag, length as uint64, bytes."""
    return tag + struct.pack("<Q", len(value)) + value


def number(tag: bytes, value: int) -> bytes:
    """Encodes a number as a field."""
    return field(tag, struct.pack("<Q", value))


def expected_digests() -> bytes:
    """Computes both digests from the documentation alone."""
    plane = field(b"n", b"k") + number(b"l", 1) + field(b"d", b"float32") + number(b"g", BLOCK_BYTES)
    plane += field(b"i", b"token_head_dim")
    pool = field(b"m", b"m") + number(b"r", 1) + number(b"b", BLOCK_TOKENS) + field(b"p", plane)
    namespace = b"".join(
        field(tag, value)
        for tag, value in (
            (b"S", b"kvharbor-digest-1"),
            (b"t", b"t"),
            (b"I", pool),
            (b"v", b""),
            (b"a", b""),
            (b"s", b"s"),
        )
    )
    parent, digests = hashlib.sha256(namespace).digest(), b""
    for first in range(0, len(PROMPT), BLOCK_TOKENS):
        parent = hashlib.sha256(parent + tokens(*PROMPT[first : first + BLOCK_TOKENS])).digest()
        digests += parent
    return digests


def digests_of(service: ServiceProcess) -> bytes:
    """Commits the prompt and returns what a watcher is told of it."""
    with RawCaller(str(service.socket)) as caller:
        pool_id = caller.open_pool("p")
        request = cache.AllocateRequest(pool_id=pool_id, token_ids=tokens(*PROMPT), namespace=NAMESPACE)
        sequence = caller.call(caller.cache.Allocate, request).sequence
        item = cache.CommitItem(sequence_id=sequence.sequence_id, computed_tokens=len(PROMPT))
        caller.call(caller.cache.Commit, cache.CommitRequest(pool_id=pool_id, items=[item]))
        lookup = cache.LookupRequest(pool_id=pool_id, token_ids=tokens(*PROMPT), namespace=NAMESPACE)
        assert caller.call(caller.cache.Lookup, lookup).present_tokens == len(PROMPT)
        stream = caller.call(caller.cache.Watch, cache.WatchRequest(pool_id=pool_id))
        (chain,) = next(stream).snapshot.stored
        stream.cancel()
        return bytes(chain.digests)


@pytest.mark.parametrize("seed", [None, "0", "12345"])
def test_digests_do_not_depend_on_the_process(start_fresh: StartService, seed: str | None) -> None:
    """K1: tenant t, salt s; equal to what the documentation gives, whatever Python's hash seed."""
    environment = {"KVHARBOR_TENANTS": f'{{"{os.getuid()}": "t"}}'}
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    assert digests_of(start_fresh(environment=environment)) == expected_digests()


def test_digests_are_the_same_after_a_restart(start_fresh: StartService) -> None:
    """K1: recommitted content is found and named as before."""
    environment = {"KVHARBOR_TENANTS": f'{{"{os.getuid()}": "t"}}'}
    first = start_fresh(environment=environment)
    before = digests_of(first)
    first.kill()
    assert digests_of(start_fresh(socket=first.socket, environment=environment)) == before == expected_digests()
