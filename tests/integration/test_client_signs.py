"""Steps that last longer than others are patient, against a real service: what they compute is computed once [W7]."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from integration.client_worker import BLOCK_TOKENS, LAYOUT, pool_size
from kvharbor.client import Chain, CommitChain, Pool, connect
from waiting import until

pytestmark = pytest.mark.slow

PROMPT = Chain(tokens=range(2 * BLOCK_TOKENS), table_block_count=2, computes=True)
ASKED = Chain(tokens=range(2 * BLOCK_TOKENS))
STEP_S = 2.6
"""Longer than a writer that says nothing is waited for."""
WAIT_S = 30.0


@pytest.fixture
def pools(harbor: str, request: pytest.FixtureRequest) -> Iterator[list[Pool]]:
    """A pool as three sessions have it."""
    with connect(harbor) as one, connect(harbor) as two, connect(harbor) as three:
        name = f"signs-{request.node.name}"
        yield [each.open_pool(name, LAYOUT, pool_size(16)) for each in (one, two, three)]


def is_pending(pool: Pool) -> bool:
    """Whether another session is waited for, that computes the prompt."""
    (found,) = pool.blocks.acquire([ASKED])
    return found.pending is not None and not found.pending.has_stalled


def test_a_step_that_lasts_is_waited_for(pools: list[Pool]) -> None:
    """By one that asks again and again, and by an Allocate that waits; both find all of it."""
    one, two, three = pools
    (got,) = one.blocks.acquire([PROMPT])
    with ThreadPoolExecutor(1) as elsewhere:
        with one.blocks.computing:
            waiting = elsewhere.submit(three.allocate, range(2 * BLOCK_TOKENS + 1), pending_wait_s=WAIT_S)
            until(lambda: one.stats().pending_waiting_count == 1)
            until_s = time.monotonic() + STEP_S
            while time.monotonic() < until_s:
                assert is_pending(two)
                assert not waiting.done()
        one.blocks.commit([CommitChain(blocks=got.leased, tokens=range(2 * BLOCK_TOKENS))])
        with waiting.result() as sequence:
            assert sequence.cached_tokens == 2 * BLOCK_TOKENS
    (found,) = two.blocks.acquire([ASKED])
    assert len(found.held) == 2
    counters = one.stats().counters
    assert (counters.committed_block_count, counters.shadow_block_count, counters.takeover_count) == (2, 0, 0)


def test_who_says_nothing_is_not_waited_for(pools: list[Pool]) -> None:
    """Signs end with the step, though nothing of it was committed; whoever waits takes over then."""
    one, two, three = pools
    one.blocks.acquire([PROMPT])
    with one.blocks.computing:
        assert is_pending(two)
    with three.allocate(range(2 * BLOCK_TOKENS + 1), pending_wait_s=WAIT_S) as sequence:
        assert sequence.cached_tokens == 0
    until(lambda: is_pending(two), lambda pending: not pending)
    assert one.stats().counters.takeover_count == 1
