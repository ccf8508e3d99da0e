"""HitDensity, alone and as the pool uses it."""

import random

import pytest
from calls import allocate, cache, new_pool, present, prompt, publish, release, span

from kvharbor.pool import Pool
from kvharbor.pool.hit_density import HitDensity
from kvharbor.pool.reuse import AGES, ReuseTimes, age_of
from kvharbor.pool.use_counts import MAX_USES, UseCounts


def new_auto(block_count: int) -> Pool:
    return new_pool(block_count, policy="auto")


def chain(first: int, blocks: int) -> list[int]:
    return span(first, first + 4 * blocks - 1)


def policy_of(pool: Pool) -> HitDensity:
    policy = pool._state.blocks.evictable
    assert isinstance(policy, HitDensity)
    return policy


def test_without_any_experience_the_one_released_first_goes_first() -> None:
    """All are worth the same then, and a chain dies from its tail [P2]."""
    pool = new_auto(8)
    first, second = chain(1, 4), chain(101, 4)
    cache(pool, first)
    cache(pool, second)
    found = []
    for number in range(4):
        allocate(pool, [900, number], session=2)
        found.append((present(pool, first), present(pool, second)))
        pool.check_invariants()
    assert found == [(12, 16), (8, 16), (4, 16), (0, 16)]


def test_what_is_used_again_and_again_outlives_what_is_used_once() -> None:
    """A prompt in steady use stays through a flood of others that are never seen again, where LRU loses it."""
    hits = {}
    for name in ("auto", "lru"):
        pool = new_pool(40, policy=name)
        hot, hits[name] = chain(1, 10), 0
        for turn in range(300):
            for scan in range(4):
                cache(pool, chain(1_000 * (10 * turn + scan + 1), 12))
            view = cache(pool, hot)
            hits[name] += view.cached_tokens // 4
        pool.check_invariants()
    assert hits["auto"] > 9 * 200
    assert hits["lru"] < 10


def test_a_parent_whose_turn_comes_first_waits_for_its_child() -> None:
    """[P2] A parent may stand before its child: it goes right after it, and no chain loses its middle."""
    pool = new_auto(12)
    policy = policy_of(pool)
    stem = chain(1, 2)
    cache(pool, [*stem, *chain(101, 2)])
    # Children of later releases stand in the queue of their own uses, the stem in that of many.
    for turn in range(MAX_USES):
        release(pool, allocate(pool, stem, most=len(stem)))
        assert present(pool, stem) == 8, turn
    order = policy.pop_many(4)
    parents = pool._state.tree.parent
    assert all(order.index(block) < order.index(parents[block]) for block in order if parents[block] in order)


@pytest.mark.parametrize("seed", range(20))
def test_no_block_goes_before_its_cached_children(seed: int) -> None:
    """[P2] Whatever was released, revived and evicted before, in whatever shape of tree."""
    chance = random.Random(seed)
    pool = new_auto(24)
    prompts: list[list[int]] = []
    for step in range(200):
        base = chance.choice(prompts) if prompts and chance.random() < 0.7 else []
        kept = base[: 4 * chance.randint(0, len(base) // 4)]
        prompt = [*kept, *chain(1_000 * (step + 1), chance.randint(1, 4))][: 4 * 12]
        prompts.append(prompt)
        cache(pool, prompt)
        if chance.random() < 0.2:
            cache(pool, chance.choice(prompts))
        pool.check_invariants()


def test_what_it_remembers_is_bounded() -> None:
    """A flood of contents that are never seen again leaves no trace beyond the sample's size."""
    pool = new_auto(64)
    policy = policy_of(pool)
    for number in range(1, 500):
        cache(pool, chain(10_000 * number, 16))
    assert len(policy._reuse._followed) <= 2 * 8 * 64
    assert len(policy) + pool.stats().free_block_count == 64
    assert not policy._waiting
    assert not policy._waits_for


@pytest.mark.parametrize("block_count", [1, 500, 1_023, 1_024, 100_000, 1_000_000])
def test_the_sample_is_small_in_a_pool_of_any_size(block_count: int) -> None:
    """Of all that is published until a content is forgotten, at most about 8,192 are followed, and not too few."""
    published_count = 8 * block_count
    followed_count = published_count / (ReuseTimes(block_count, MAX_USES).sample_mask + 1)
    assert min(published_count, 4_096) <= followed_count < 8_192


def test_a_chain_as_long_as_the_pool_waits_in_several_steps() -> None:
    """[G9] Its leaf alone is worth keeping, so all others come up first: no step of an operation goes through them."""
    pool = new_auto(5_001)
    policy = policy_of(pool)
    stem, leaf = chain(1, 5_000), chain(99_001, 1)
    cache(pool, stem)
    view = publish(pool, [*stem, *leaf])
    release(pool, view)
    policy._reuse.density[0] = [1.0] * AGES
    steps = pool.allocate(2, prompt(chain(70_001, 2)))
    waiting_counts = [len(policy._waits_for) for _ in steps]
    assert waiting_counts == [1_024, 2_048, 3_072, 4_096]
    assert present(pool, [*stem, *leaf]) == 4 * 4_999
    pool.check_invariants()


def test_a_parent_of_many_is_not_looked_at_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for one child after the other, and is in no queue until the last is gone [P2]."""
    pool = new_auto(300)
    policy = policy_of(pool)
    children = [[*chain(1, 1), *chain(1_000 * (number + 1), 1)] for number in range(100)]
    for child in children:
        cache(pool, child)
    for number, child in enumerate(reversed(children)):
        # The latest child first, each at a time of its own: the order in which each is the one waited for.
        release(pool, allocate(pool, child, most=8))
        cache(pool, chain(500_000 + 4 * number, 1))
    policy._reuse.density[0] = policy._reuse.density[1] = [1.0] * AGES
    waits: list[int] = []

    def wait(block: int, child: int, released_at: int) -> None:
        waits.append(block)
        HitDensity._wait(policy, block, child, released_at)

    monkeypatch.setattr(policy, "_wait", wait)
    victims = policy.pop_many(201)
    assert len(waits) == 1
    parents = pool._state.tree.parent
    last_child = max(place for place, block in enumerate(victims) if parents[block] == waits[0])
    assert victims.index(waits[0]) > last_child


def test_uses_are_remembered_for_a_while() -> None:
    """Until the pool's blocks were published four times over, at least, and at most twice as long."""
    counts = UseCounts(16)
    content, leading_zeros = 0x1234_5678, 0x0000_0123
    counts.remember([content, leading_zeros], [3, 5])
    assert counts.of([content, content ^ 1 << 30]) == [3, 0]
    counts.advance(64)
    assert counts.of([content, leading_zeros]) == [3, 5]
    counts.advance(63)
    assert counts.of([content]) == [3]
    counts.advance(1)
    assert counts.of([content]) == [0]


def test_ages_are_octaves() -> None:
    """Of published blocks; at once counts as one."""
    assert [age_of(count) for count in (0, 1, 2, 3, 4, 7, 8, 1 << 20)] == [0, 0, 1, 1, 2, 2, 3, 20]


def test_the_density_of_a_kind_is_its_hits_over_its_block_time() -> None:
    """By hand: four released, all used again two to four published blocks later; one is taken never to be."""
    reuse = ReuseTimes(64, 2)
    for content in (0, 1 << 20, 2 << 20, 3 << 20):
        reuse.released(content, 1, 0)
        reuse.reused(content, 2)
    reuse.advance(64)
    # Five live through the first octave, of length 1; five begin and one ends the second, of length 2; one stays to
    # the horizon of 4 * 64 = 2^8 and its octave.
    later = sum(1 << age for age in range(2, 9))
    assert reuse.density[1][0] == pytest.approx(4 / (5 * 1 + 3 * 2 + later))
    assert reuse.density[1][1] == pytest.approx(4 / (3 * 2 + later))
    assert reuse.density[1][2:] == [0.0] * (AGES - 2)
    assert reuse.density[0] == [0.0] * AGES


def test_a_new_class_is_like_the_first_and_comes_into_its_own() -> None:
    """[H1] What is known of the first counts for it like 32 releases."""
    reuse = ReuseTimes(64, 1)
    for content in range(64):
        reuse.released(content, 0, 0)
        reuse.reused(content, 2)
    reuse.advance(64)
    reuse.add_class()
    assert reuse.density[1] == reuse.density[0]
    assert reuse.density[1][0] > 0
    for content in range(64):
        reuse.released(content, 1, 64)
    reuse.advance(128)
    # A third of 96 releases is asked for again, and the one that is taken never to be is one in 97.
    later = sum(1 << age for age in range(2, 9)) * (97 - 32)
    assert reuse.density[1][0] == pytest.approx(32 / (97 * 1 + (97 + 65) / 2 * 2 + later))
