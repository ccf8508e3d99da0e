"""Requests whose input comes in parts (vLLM's resumable ones): they keep their blocks in between, without running."""

import pytest

from engines.churn import Churn
from engines.scheduler_configs import BLOCK_TOKENS
from engines.scheduler_world import Engine, expected_answer

pytestmark = pytest.mark.timeout(300)

KINDS = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
FIRST, MORE = [*range(2 * BLOCK_TOKENS)], [*range(100, 100 + 3 * BLOCK_TOKENS)]
STEPS = 100


def answered(engine: Engine, request_id: str, count: int) -> list[int]:
    """Returns a request's answer when it has so many tokens, and nothing is under way."""
    for _ in range(STEPS):
        if len(engine.answers[request_id]) == count and not engine.under_way:
            return engine.answers[request_id]
        engine.step()
    raise AssertionError(f"after {STEPS} steps {request_id} has {len(engine.answers[request_id])} of {count} tokens")


def committed_count(churn: Churn) -> int:
    return sum(block.state == "committed" for block in churn.owner.blocks)


@KINDS
def test_more_input_gets_room(asynchronous: bool) -> None:
    """Also where nothing else runs, so that nobody has leased a block; and in a pool that others have filled."""
    churn = Churn(asynchronous=asynchronous, seed=1)
    engine, other = churn.engines
    engine.add("session", FIRST, 3, resumable=True)
    answered(engine, "session", 3)
    other.add("other", [*range(200, 200 + 8 * BLOCK_TOKENS)], 4)
    answered(other, "other", 4)
    for _ in range(3):
        engine.go_on("session", MORE, 4)
        asked = [*engine.tokens["session"]]
        assert answered(engine, "session", 4) == expected_answer(churn.world, "", asked, 4)
    engine.abort("session")
    churn.drain()
    churn.check()


@KINDS
def test_more_input_is_computed_at_once_beside_what_only_decodes(asynchronous: bool) -> None:
    """E29: whoever has blocks and waits for more of them is somebody who waits."""
    churn = Churn(asynchronous=asynchronous, seed=4)
    engine, _ = churn.engines
    engine.add("session", FIRST, 3, resumable=True)
    answered(engine, "session", 3)
    churn.ask("decodes", engine, [*range(200, 203)], BLOCK_TOKENS)
    for _ in range(4):
        engine.step()
    engine.go_on("session", MORE, 4)
    assert "session" in {row.request_id for row in engine.schedule().rows}
    answered(engine, "session", 4)
    engine.abort("session")
    churn.drain()
    churn.check()


@KINDS
def test_a_session_that_waits_for_input_needs_no_block_yet(asynchronous: bool) -> None:
    """E14: though its last token, which is not computed, would be the first one of another."""
    churn = Churn(asynchronous=asynchronous, seed=5)
    engine, _ = churn.engines
    engine.add("session", FIRST[:-3], 4, resumable=True)
    answered(engine, "session", 4)
    assert len(engine.tokens["session"]) == len(FIRST) + 1
    churn.ask("comes", engine, [7], 4)
    engine.scheduler._admission.prepare(engine.scheduler)
    assert engine.scheduler._owed() == engine.scheduler._admission.lacking == 1
    engine.abort("session")
    churn.drain()
    churn.check()


@KINDS
def test_a_session_from_before_a_reset_publishes_no_more(asynchronous: bool) -> None:
    """It goes on with KV of other weights, though it does not run as the prefix cache is reset."""
    churn = Churn(asynchronous=asynchronous, seed=2)
    engine, _ = churn.engines
    engine.add("session", FIRST, 3, resumable=True)
    answered(engine, "session", 3)
    before = committed_count(churn)
    engine.take_weights(1, preempt=False)
    engine.weights = 0  # of what the session goes on with, its first blocks are of the old ones
    engine.go_on("session", MORE, 4)
    answered(engine, "session", 4)
    assert len(engine.scheduler._pool.held) > before
    assert len(engine.scheduler._pool.cached_block_hash_to_block) == 0
    assert committed_count(churn) == before
    engine.abort("session")
    churn.drain()
    assert not engine.scheduler._pool.held


@KINDS
def test_a_session_is_given_up_with_all_that_it_holds(asynchronous: bool) -> None:
    """Between two inputs, and while it waits for room."""
    churn = Churn(asynchronous=asynchronous, seed=3, block_count=17)
    engine, other = churn.engines
    other.add("other", [*range(200, 200 + 13 * BLOCK_TOKENS)], 30)
    other.step()
    engine.add("session", FIRST[:20], 3, resumable=True)
    answered(engine, "session", 3)
    engine.go_on("session", MORE, 4)
    for _ in range(5):
        engine.step()
    assert not engine.answers["session"]
    engine.abort("session")
    answered(other, "other", 30)
    churn.drain()
    churn.check()
