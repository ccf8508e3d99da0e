"""PrefixTree against a dictionary, through walks of chance."""

import random

import pytest
from naive_tree import Walk

from kvharbor.pool import tree


@pytest.mark.parametrize("block_tokens", [1, 8, 9])
@pytest.mark.parametrize("seed", range(20))
def test_a_walk_of_chance_finds_what_a_dictionary_finds(
    seed: int, block_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """[G1] By exactly the content behind exactly the prefix, whatever has come and gone around it."""
    if seed % 2:
        monkeypatch.setattr(tree, "_STRETCH", 3)
    Walk(random.Random(seed), block_tokens).run()
