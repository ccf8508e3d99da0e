"""What chaos takes for the right bytes: one changed byte, token or prefix is seen."""

import numpy as np

from chaos.stamps import BLOCK_TOKENS, stamps
from chaos.universe import SCHEMES, VERSIONS, variant
from kvharbor.client import Namespace


def test_a_tokens_bytes_depend_on_its_whole_prefix_and_on_nothing_behind_it() -> None:
    """A prompt that is cut has the same bytes, one that differs anywhere before has others in every part."""
    tokens = list(range(3 * BLOCK_TOKENS))
    whole = stamps(tokens)
    assert np.array_equal(stamps(tokens[:20]), whole[:20])
    changed = stamps([1, *tokens[1:]])
    assert (changed != whole).any(axis=(2, 3)).all()


def test_no_two_variants_have_the_same_bytes() -> None:
    """Neither weights nor schemes: whoever finds the blocks of another namespace sees that."""
    tokens = list(range(BLOCK_TOKENS))
    namespaces = [Namespace(version=version, scheme=scheme) for version in ("", *VERSIONS) for scheme in SCHEMES]
    parts = {stamps(tokens, variant(namespace))[0, 0].tobytes() for namespace in namespaces}
    assert len(parts) == len(namespaces)
    assert variant(Namespace()) == ""


def test_no_part_of_a_token_has_the_bytes_of_another() -> None:
    """Layers, planes and positions never look alike."""
    parts = stamps([5] * BLOCK_TOKENS).reshape(-1, 32)
    assert len({part.tobytes() for part in parts}) == len(parts)
