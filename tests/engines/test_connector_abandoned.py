"""Prompts that an engine with a connector has said to store, and gives up: others are told [E18]."""

import random

import pytest

from engines.test_connector_plans import Engine, Request
from engines.test_connector_plans import rng as rng
from fake_blocks import FakeCalls, FakeOwner


def test_others_are_told_of_a_prompt_that_is_given_up(rng: random.Random) -> None:
    """[E18] After what is under way of it is published; not while another request computes just the same."""
    engine = Engine(FakeOwner(20, 1, 1), {})
    keys = [rng.randbytes(32) for _ in range(5)]
    for name in ("a", "b"):
        engine.admit(Request(name, keys, 21))
    engine.step(rng)
    engine.end("a")
    engine.arrive()
    assert engine.calls.marks
    engine.step(rng)
    engine.end("b")
    assert "abandon" not in engine.calls.calls
    engine.arrive()
    assert [call for call in engine.calls.calls if call in ("commit", "abandon")][-2:] == ["commit", "abandon"]
    assert not engine.calls.marks


def test_a_prompt_that_is_stored_is_not_given_up(rng: random.Random) -> None:
    """[E18] Nothing is told of it."""
    engine = Engine(FakeOwner(20, 1, 1), {})
    engine.admit(Request("a", [rng.randbytes(32) for _ in range(5)], 21))
    while engine.running["a"].num_computed_tokens < 21:
        engine.step(rng)
    engine.end("a")
    while engine.flying:
        engine.arrive()
    assert "abandon" not in engine.calls.calls


def test_others_are_told_where_storing_has_failed_or_is_void(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """[E18] At once: a reset leaves the namespace in which it was said."""
    monkeypatch.setattr(FakeCalls, "bump_namespace", lambda _: "", raising=False)
    for is_reset in (False, True):
        engine = Engine(FakeOwner(20, 1, 1), {})
        engine.admit(Request("a", [rng.randbytes(32) for _ in range(5)], 21))
        while not engine.flying:
            engine.schedule(rng, fails=True)
            engine.run()
        assert engine.calls.marks
        if is_reset:
            engine.half.reset()
        else:
            engine.arrive()
        assert not engine.calls.marks
