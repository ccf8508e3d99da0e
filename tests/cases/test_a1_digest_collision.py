"""A1: a digest names a block outside the pool; what matches inside is decided by tokens and parents alone."""

import hashlib
from collections import Counter
from types import SimpleNamespace

import pytest
from calls import allocate, commit, new_pool, present, release, span

from kvharbor.pool import namespaces, tree
from kvharbor.pool.digest import DIGEST_BYTES


@pytest.fixture(params=[1, 16], ids=["all_equal", "4_bits"])
def digest_values(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Cuts every digest down to a few values, so that collisions are certain."""
    count: int = request.param

    class Cut:
        def __init__(self, hashed: bytes) -> None:
            self._value = hashlib.sha256(hashed).digest()[0] % count

        def digest(self) -> bytes:
            return bytes([self._value]) * DIGEST_BYTES

    monkeypatch.setattr(tree, "hashlib", SimpleNamespace(sha256=Cut))
    monkeypatch.setattr(namespaces, "namespace_digest", lambda *_: b"n")
    return count


def test_another_prompts_block_is_never_returned(digest_values: int) -> None:
    """A1: forty prompts on sixteen digests, or on one: each hit has its own stamp, and none is lost."""
    pool = new_pool(64)
    stamps: dict[int, int] = {}
    prompts = [[i, i + 100, i + 200, i + 300] for i in range(40)]
    for i, tokens in enumerate(prompts):
        view = allocate(pool, tokens)
        stamps[view.block_ids[0]] = i
        commit(pool, view, 4)
        release(pool, view)
    digests = Counter(chain.digests for chain in pool.index_chains())
    assert len(digests) <= digest_values
    for i, tokens in enumerate(prompts):
        assert present(pool, tokens) == 4
        view = allocate(pool, [*tokens, 999])
        assert (view.cached_tokens, stamps[view.block_ids[0]]) == (4, i)
        release(pool, view)


def test_a_collision_of_parents_does_not_lend_children(digest_values: int) -> None:
    """A1: what lies behind one prefix is not found behind another of the same digest."""
    pool = new_pool(64)
    firsts = [[i] * 4 for i in range(20)]
    view = allocate(pool, [*firsts[0], *span(900, 903)])
    commit(pool, view, 8)
    for first in firsts[1:]:
        commit(pool, allocate(pool, first), 4)
        assert present(pool, [*first, *span(900, 903)]) == 4
    assert present(pool, [*firsts[0], *span(900, 903)]) == 8
    for tenant in ("u", "v"):
        assert present(pool, firsts[0], tenant) == 0
