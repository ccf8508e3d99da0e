"""How the next token is chosen."""

import math
from typing import Any

import pytest
import torch

from kvharbor.engines.transformers import RequestInvalid, Sampling
from kvharbor.engines.transformers.sampling import greedy, sampler

LOGITS = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))


def drawn(sampling: Sampling, count: int = 4000) -> list[float]:
    """How often each token is chosen, over the positions of one long answer."""
    choose = sampler(sampling, prompt_index=0, answer_index=0)
    chosen = torch.tensor([choose(LOGITS, position) for position in range(count)])
    return (torch.bincount(chosen, minlength=4) / count).tolist()


def test_greedy_takes_the_most_likely_token() -> None:
    """The same one each time."""
    assert [greedy(LOGITS, position) for position in range(3)] == [0, 0, 0]


@pytest.mark.slow
def test_draws_follow_the_probabilities() -> None:
    """Seeds made anew for each position still draw like one good source."""
    assert pytest.approx(drawn(Sampling(seed=1)), abs=0.03) == [0.5, 0.3, 0.15, 0.05]


@pytest.mark.slow
def test_temperature_sharpens() -> None:
    """At temperature 1/2 probabilities are squared."""
    squares = [0.25, 0.09, 0.0225, 0.0025]
    expected = [square / math.fsum(squares) for square in squares]
    assert expected == pytest.approx(drawn(Sampling(temperature=0.5, seed=2)), abs=0.03)


@pytest.mark.parametrize("sampling", [Sampling(top_p=0.75, seed=3), Sampling(top_k=2, seed=3)])
def test_unlikely_tokens_are_cut_off(sampling: Sampling) -> None:
    """top_p keeps the fewest tokens that reach it, top_k the first so many."""
    shares = drawn(sampling, 300)
    assert shares[2:] == [0.0, 0.0]
    assert min(shares[:2]) > 0.2


def test_a_draw_depends_on_seed_and_place_only() -> None:
    """The same place draws the same token in any order; another seed, prompt or answer draws on its own."""
    positions = range(200)
    first = sampler(Sampling(seed=7), prompt_index=1, answer_index=2)
    again = sampler(Sampling(seed=7), prompt_index=1, answer_index=2)
    draws = [first(LOGITS, position) for position in positions]
    assert draws == [again(LOGITS, position) for position in reversed(positions)][::-1]
    for seed, prompt, answer in ((8, 1, 2), (7, 0, 2), (7, 1, 3)):
        other = sampler(Sampling(seed=seed), prompt_index=prompt, answer_index=answer)
        assert draws != [other(LOGITS, position) for position in positions]


def test_without_a_seed_each_answer_differs() -> None:
    """Two samplers without a seed do not repeat each other."""
    first, second = (sampler(Sampling(), prompt_index=0, answer_index=0) for _ in range(2))
    assert [first(LOGITS, position) for position in range(200)] != [second(LOGITS, position) for position in range(200)]


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": 0.0},
        {"temperature": math.inf},
        {"temperature": math.nan},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"seed": 2**63},
    ],
    ids=str,
)
def test_settings_that_cannot_sample_are_refused(wrong: dict[str, Any]) -> None:
    """Value, limit and remedy are named, before anything is drawn."""
    with pytest.raises(RequestInvalid) as refusal:
        Sampling(**wrong)
    assert next(iter(wrong)) == refusal.value.field
