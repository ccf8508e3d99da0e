"""Allocates that wait where each session is guaranteed something: who has less than that is served first."""

import pytest

from admission_bench import BLOCK_TOKENS, Bench, commit_all
from kvharbor.pool import Prompt
from kvharbor.pool.errors import PoolExhausted
from scenarios import run, settled


def test_who_has_less_than_is_guaranteed_is_served_first() -> None:
    """Before one who came earlier and would fit, and who has his share; that one follows."""

    async def scenario() -> None:
        bench = Bench(8, guaranteed_count=2)
        held = [await bench.allocate(1, 2) for _ in range(4)]
        rich = bench.allocate(1, 1, wait_s=60)
        await settled()
        poor = bench.allocate(2, 4, wait_s=60)
        await settled()
        await bench.release(held[0])
        await settled()
        assert (rich.done(), poor.done()) == (False, False)
        with pytest.raises(PoolExhausted):
            await bench.allocate(1, 1)
        await bench.release(held[1])
        assert len((await poor).block_ids) == 4
        assert not rich.done()
        await bench.release(held[2])
        assert len((await rich).block_ids) == 1

    run(scenario)


def test_a_first_claim_is_one_as_long_as_its_session_is_poor() -> None:
    """Once that has its share by other means, it waits as everybody."""

    async def scenario() -> None:
        bench = Bench(8, guaranteed_count=2)
        held = [await bench.allocate(1, 2) for _ in range(3)]
        poor = bench.allocate(2, 4, wait_s=60)
        await settled()
        with pytest.raises(PoolExhausted):
            await bench.allocate(1, 2)
        grown = await bench.owner.run(bench.turns[2], lambda: bench.pool.allocate(2, bench.prompt(2)))
        await bench.release(held[0])
        assert len((await bench.allocate(1, 2)).block_ids) == 2
        assert grown.capacity_tokens == 2 * BLOCK_TOKENS
        poor.cancel()

    run(scenario)


def test_nobody_is_served_before_a_first_claim_that_only_looked_as_if_it_fitted() -> None:
    """What it would find is cached, and no room for the rest; others with more than their share do not profit."""

    async def scenario() -> None:
        bench = Bench(6, guaranteed_count=1)
        prefix = bench.prompt(2)
        first = await bench.allocate(1, 2, prompt=prefix)
        commit_all(bench, first)
        await bench.release(first)
        held = [await bench.allocate(1, 1) for _ in range(3)]
        head = bench.allocate(2, 6, wait_s=60)
        await settled()
        bench.now += 31
        longer = Prompt(prefix.token_ids + bench.prompt(2).token_ids)
        behind = bench.allocate(2, 4, wait_s=60, prompt=longer, estimated=2)
        rich = bench.allocate(1, 1, wait_s=60)
        await settled()
        head.cancel()
        await settled()
        assert (behind.done(), rich.done()) == (False, False)
        await bench.release(held[0])
        assert (await behind).cached_tokens == 2 * BLOCK_TOKENS
        rich.cancel()

    run(scenario)
