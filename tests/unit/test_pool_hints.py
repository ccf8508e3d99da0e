"""Hints: honest ones help, others do no harm, and none change nothing."""

import random
from dataclasses import dataclass, field

import pytest
from calls import cache, encode, new_pool, span

from kvharbor.pool import BlockRun, Chain, Commit, ExpectedReuse, Hints, Pool, Prompt
from kvharbor.pool.errors import InvalidField
from kvharbor.pool.hints import CLASSES, CLASSES_A_TENANT, NO_HINTS, HintClasses
from kvharbor.pool.hit_density import HitDensity
from kvharbor.pool.reuse import AGES
from kvharbor.pool.steps import finish
from kvharbor.pool.use_counts import MAX_USES

GOES_ON, IS_OVER = Hints(expected_reuse=ExpectedReuse.SOME), Hints(expected_reuse=ExpectedReuse.NONE)
GREEDY = Hints(priority=100, retention_s=86_400, expected_reuse=ExpectedReuse.MUCH)
HONEST, NEIGHBOUR = 1, 3  # sessions of tenants "t" and "u"


@dataclass
class Traffic:
    """Of tenant t conversations, of which most end with their first turn; of tenant u prompts that come once each.

    Both through one pool that is much too small for them.
    """

    seed: int
    is_hinting: bool = False
    neighbour_share: float = 0.0
    neighbour_hints: Hints = NO_HINTS
    pool: Pool = field(default_factory=lambda: new_pool(400, policy="auto"))
    fresh: int = 0
    hits: int = 0
    asked: int = 0

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.going_on: list[list[int]] = []

    def run(self, request_count: int = 3_000) -> float:
        """Returns the share of t's blocks that were hits."""
        for _ in range(request_count):
            if self.chance.random() < self.neighbour_share:
                self.serve(NEIGHBOUR, self.new_tokens(self.chance.randint(4, 12)), self.neighbour_hints)
            else:
                self.turn()
        self.pool.check_invariants()
        return self.hits / self.asked

    def turn(self) -> None:
        """Serves a turn of a conversation, an earlier one or a new one."""
        chance, going_on = self.chance, self.going_on
        if going_on and chance.random() < 0.35:
            tokens = going_on.pop(min(int(chance.expovariate(1 / 15)), len(going_on) - 1)) + self.new_tokens(2)
            ends = len(tokens) >= 160 or chance.random() < 0.15
        else:
            tokens = self.new_tokens(chance.randint(4, 12))
            ends = chance.random() < 0.7
        if not ends:
            going_on.insert(0, tokens)
        hints = IS_OVER if ends else GOES_ON
        self.hits += self.serve(HONEST, tokens, hints if self.is_hinting else NO_HINTS)
        self.asked += len(tokens) // 4

    def serve(self, session: int, tokens: list[int], hints: Hints) -> int:
        """Takes a prompt through its whole life; returns the blocks that were hits."""
        view = finish(self.pool.allocate(session, Prompt(encode(tokens), hints=hints), max_cached_tokens=len(tokens)))
        finish(self.pool.commit(session, view.number, Commit(len(tokens))))
        finish(self.pool.release(session, view.number))
        self.pool.drain_events()
        return view.cached_tokens // 4

    def new_tokens(self, block_count: int) -> list[int]:
        """Returns tokens that nobody has asked for."""
        self.fresh += 1
        return span(1_000 * self.fresh, 1_000 * self.fresh + 4 * block_count - 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_honest_hints_raise_the_hit_rate(seed: int) -> None:
    """[H1] Who knows which conversation is over has a quarter more hits, by saying so."""
    assert Traffic(seed, is_hinting=True).run() >= 1.2 * Traffic(seed).run()


@pytest.mark.slow
@pytest.mark.parametrize("is_hinting", [False, True])
def test_lies_of_one_tenant_do_not_cost_another(is_hinting: bool) -> None:
    """[H1] [G8] Whoever claims most for what nobody asks for again leaves others 0.97 of their hits, or more."""
    beside_silent = Traffic(1, is_hinting, neighbour_share=0.4).run()
    beside_liar = Traffic(1, is_hinting, neighbour_share=0.4, neighbour_hints=GREEDY).run()
    assert beside_liar >= 0.97 * beside_silent


@pytest.mark.slow
def test_a_good_name_does_not_last() -> None:
    """[H1] Nor does one that has earned well first, and then holds what is never asked for again."""
    rates = {}
    for hints in (NO_HINTS, GREEDY):
        traffic = Traffic(0, neighbour_share=0.4, neighbour_hints=hints)
        for _ in range(200):
            traffic.serve(NEIGHBOUR, span(1, 40), hints)
            traffic.serve(HONEST, traffic.new_tokens(12), NO_HINTS)
        rates[hints] = traffic.run()
    assert rates[GREEDY] >= 0.97 * rates[NO_HINTS]


@pytest.mark.slow
def test_lies_about_oneself_are_found_out() -> None:
    """[H1] A tenant that has its hints the wrong way round has its hits nevertheless."""

    class Confused(Traffic):
        def serve(self, session: int, tokens: list[int], hints: Hints) -> int:
            return super().serve(session, tokens, IS_OVER if hints == GOES_ON else GOES_ON)

    assert Confused(0, is_hinting=True).run() == Traffic(0, is_hinting=True).run()


def test_classes_are_few_and_each_of_one_tenant() -> None:
    """Those that come first; whoever has too many has none for the rest, and takes none of the others' away."""
    classes = HintClasses()
    assert classes.number("t", NO_HINTS) == classes.number("t", Hints()) == 0
    numbers = [classes.number("t", Hints(priority=priority)) for priority in range(1, 8)]
    assert numbers == [1, 2, 3, CLASSES_A_TENANT, 0, 0, 0]
    assert classes.number("u", Hints(priority=1)) == 5
    assert classes.number("t", Hints(priority=1)) == 1
    for tenant in range(20):
        for priority in range(1, 8):
            assert classes.number(str(tenant), Hints(priority=priority)) <= CLASSES


def test_times_of_one_power_of_four_are_one_class() -> None:
    """A caller that computes them anew for each request uses up nothing."""
    classes = HintClasses()
    numbers = [classes.number("t", Hints(retention_s=seconds)) for seconds in (0.001, 1, 3.9, 4, 15.9, 16, 64, 255)]
    assert numbers == [1, 1, 1, 2, 2, 3, 4, 4]


def classes_of(pool: Pool) -> dict[int, int]:
    """Returns the class of each cached block."""
    policy = pool._state.blocks.evictable
    assert isinstance(policy, HitDensity)
    return {block: policy._place[block] // MAX_USES for block in policy}


def test_a_hint_is_about_what_the_request_publishes() -> None:
    """[H1] Its own blocks, generated ones and those of forked children too; not what it has found."""
    pool = new_pool(16, policy="auto")
    found = finish(pool.allocate(HONEST, Prompt(encode(span(1, 4)))))
    finish(pool.commit(HONEST, found.number, Commit(4)))
    finish(pool.release(HONEST, found.number))
    asked = Prompt(encode(span(1, 8)), hints=GREEDY)
    view = finish(pool.allocate(HONEST, asked, reserve_tokens=4))
    finish(pool.commit(HONEST, view.number, Commit(8)))
    (child,) = pool.finish_fork(finish(pool.fork(HONEST, view.number, 1, reserve_tokens=4)))
    finish(pool.commit(HONEST, child.number, Commit(12, encode(span(21, 24)))))
    finish(pool.commit(HONEST, view.number, Commit(12, encode(span(31, 34)))))
    for number in (child.number, view.number):
        finish(pool.release(HONEST, number))
    expected = {found.block_ids[0]: 0, view.block_ids[1]: 1, view.block_ids[2]: 1, child.block_ids[2]: 1}
    assert classes_of(pool) == expected


def test_a_parent_that_has_waited_has_its_turn_in_the_class_of_its_child() -> None:
    """[P2] Where it would have come up behind it, also if the child goes by somebody's choice."""
    pool = new_pool(16, policy="auto")
    policy = pool._state.blocks.evictable
    assert isinstance(policy, HitDensity)
    parent = cache(pool, span(1, 4)).block_ids[0]
    view = finish(pool.allocate(HONEST, Prompt(encode(span(1, 8)), hints=GREEDY)))
    finish(pool.commit(HONEST, view.number, Commit(8)))
    finish(pool.release(HONEST, view.number))
    other = cache(pool, span(101, 104)).block_ids[0]
    for kind, density in ((1, 0.0), (0, 0.5), (MAX_USES, 1.0)):
        policy._reuse.density[kind] = [density] * AGES
    assert policy.pop_many(1) == [other]
    assert policy._waits_for.keys() == {parent}
    finish(pool.evict_block(view.block_ids[1], view.generations[1]))
    assert list(policy._queues[MAX_USES]) == [parent]


def test_block_calls_have_hints_too() -> None:
    """With the commit, as it is what publishes."""
    pool = new_pool(16, policy="auto")
    leased = finish(pool.lease(HONEST, 2, 2))
    nothing = BlockRun(leased.block_ids[:0], leased.generations[:0])
    finish(pool.commit_blocks(HONEST, nothing, leased, Chain(encode(span(1, 8)), hints=GREEDY)))
    finish(pool.release_blocks(HONEST, leased))
    assert classes_of(pool) == dict.fromkeys(leased.block_ids, 1)


@pytest.mark.parametrize(
    ("hints", "expected_field"),
    [
        (Hints(priority=101), "hints.priority"),
        (Hints(priority=-101), "hints.priority"),
        (Hints(retention_s=-1), "hints.retention"),
        (Hints(retention_s=float("nan")), "hints.retention"),
        (Hints(retention_s=1e9), "hints.retention"),
    ],
)
def test_absurd_hints_are_refused(hints: Hints, expected_field: str) -> None:
    """Before anything is held."""
    pool = new_pool(16)
    with pytest.raises(InvalidField) as refused:
        finish(pool.allocate(HONEST, Prompt(encode(span(1, 4)), hints=hints)))
    assert refused.value.attributes["field"] == expected_field
    assert pool.stats().sequence_count == 0
