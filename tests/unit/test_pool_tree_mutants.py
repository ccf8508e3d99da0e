"""What the prefix tree relies on broken in turn: the walks of `tests/model` have to notice."""

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from naive_tree import Walk

from kvharbor.pool.records import Records
from kvharbor.pool.tree import PrefixTree


def contents_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """[G1] The only child of a node is taken for what is asked for."""
    monkeypatch.setattr(Records, "common_count", lambda *given, **_: len(given[1]))


def extra_keys_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """[G1] Equal tokens are enough."""
    monkeypatch.setattr(PrefixTree, "_common_extras", lambda *given: len(given[1]))


def index_entry_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child among siblings goes, and its entry stays."""
    unlink = PrefixTree._unlink

    def changed(self: PrefixTree, block: int, *where: Any) -> None:
        key = self._key(block)
        unlink(self, block, *where)
        self.siblings[key] = block

    monkeypatch.setattr(PrefixTree, "_unlink", changed)


def first_sibling_not_indexed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's only child gets a sibling, and no entry."""
    link = PrefixTree._link

    def changed(self: PrefixTree, *given: Any) -> bool:
        before = dict(self.siblings)
        is_new = link(self, *given)
        added = [key for key in self.siblings if key not in before]
        if len(added) == 2:
            del self.siblings[added[0]]
        return is_new

    monkeypatch.setattr(PrefixTree, "_link", changed)


def digests_of_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is gone is told under the name of another block."""
    digests = Records.digests

    def changed(self: Records, blocks: Iterable[int]) -> list[bytes]:
        return digests(self, [block ^ 1 for block in blocks])

    monkeypatch.setattr(Records, "digests", changed)


MUTANTS = [
    contents_not_compared,
    extra_keys_not_compared,
    index_entry_left,
    first_sibling_not_indexed,
    digests_of_neighbours,
]


@pytest.mark.parametrize("break_it", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_broken_tree_is_noticed(break_it: Callable[[pytest.MonkeyPatch], None], monkeypatch: Any) -> None:
    """A walk that the tree takes without a complaint fails."""
    break_it(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        _walk_all()


def _walk_all() -> None:
    for seed in range(5):
        Walk(random.Random(seed), 8).run()
