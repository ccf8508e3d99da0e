"""Replays of traces small enough to be worked out by hand, and the optimum against every other choice."""

from collections.abc import Iterator
from functools import cache
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvharbor.server.errors import CommandError
from kvharbor.server.replay.capacities import block_counts
from kvharbor.server.replay.modes import Mode, run_concurrently
from kvharbor.server.replay.optimum import OfflineOptimum
from kvharbor.server.replay.policies import NAMES
from kvharbor.server.replay.pool_cache import PoolCache
from kvharbor.server.replay.run import Outcome, Setting, replay
from kvharbor.server.traces.trace import Request, Trace
from trace_files import asked, trace_of

SEQUENTIAL, CONCURRENT = Mode.SEQUENTIAL, Mode.CONCURRENT


def counts(trace: Trace, policy: str, block_count: int, mode: Mode = SEQUENTIAL) -> tuple[int, int]:
    """Returns hit blocks and evictions."""
    outcome = replay(trace, Setting(policy, block_count, mode))
    return outcome.hit_block_count, outcome.evicted_block_count


def test_lru_gives_up_tails_first() -> None:
    """After ab, ac, ab a pool of three has c, b, a in the order of release: de takes c and b, and a stays."""
    trace = trace_of("ab", "ac", "ab", "de", "ab")
    assert counts(trace, "lru", 3) == (1 + 2 + 1, 2 + 1)


def test_the_optimum_knows_what_comes() -> None:
    """LRU gives up a for c; who knows that a comes again gives up b."""
    trace = trace_of("a", "b", "c", "a")
    assert counts(trace, "lru", 2) == (0, 2)
    assert counts(trace, "min", 2) == (1, 1)


@pytest.mark.parametrize("policy", NAMES)
def test_with_room_for_all_everything_asked_for_again_is_a_hit(policy: str) -> None:
    """The ceiling that the table names."""
    trace = trace_of("abc", "abd", "xyz", "abc", "xy")
    hits, evictions = counts(trace, policy, trace.unique_block_count)
    assert (hits / trace.asked_block_count, evictions) == (trace.hit_ceiling, 0)


@pytest.mark.parametrize("policy", NAMES)
def test_a_request_larger_than_the_memory_is_asked_for_and_refused(policy: str) -> None:
    """It leaves what is cached alone, and its blocks are no hits."""
    outcome = replay(trace_of("ab", "abc", "ab"), Setting(policy, 2, SEQUENTIAL))
    assert outcome == Outcome(outcome.setting, 7, 2, 0, refused_request_count=1)


@pytest.mark.parametrize("policy", NAMES)
def test_requests_without_a_whole_block_ask_for_nothing(policy: str) -> None:
    """Their output takes room all the same, if there are outputs: b has to go for the one that holds two."""
    trace = trace_of(asked("ab"), asked("", output_tokens=2), asked("ab"))
    assert counts(trace, policy, 3) == (2, 0)
    assert counts(trace, policy, 3, CONCURRENT) == (1, 1)


@pytest.mark.parametrize("policy", NAMES)
def test_first_come_is_first_served(policy: str) -> None:
    """The third would fit at once, as all it needs is held; it waits behind the second, which does not."""
    trace = trace_of(
        asked("ab", at_ms=0, output_tokens=1, duration_ms=10),
        asked("c", at_ms=1, duration_ms=5),
        asked("ab", at_ms=2, duration_ms=5),
    )
    memory = PoolCache(3, "lru") if policy != "min" else OfflineOptimum(trace.requests, 3)
    course = run_concurrently(trace.requests, memory, lambda one: one.output_tokens)
    assert (course.hit_block_count, memory.evicted_block_count) == (2, 0)
    assert (course.waited_request_count, course.waited_ms, course.most_at_once) == (2, 9 + 8, 2)


@pytest.mark.parametrize("policy", NAMES)
def test_what_a_running_request_holds_is_not_evicted(policy: str) -> None:
    """b is used before a is again, yet c cannot have a's place before its request ends."""
    held = asked("a", at_ms=0, duration_ms=100)
    after = [asked(one, at_ms=at) for at, one in enumerate("bcb", start=1)]
    assert counts(trace_of(held, *after, asked("a", at_ms=5)), policy, 2, CONCURRENT) == (1, 2)


def test_without_a_duration_a_token_of_output_takes_30_ms() -> None:
    """Two tokens: the second request waits from 50 to 60, if there is no room for both."""
    trace = trace_of(asked("a", output_tokens=2), asked("b", at_ms=50))
    caches = [PoolCache(block_count, "lru") for block_count in (3, 4)]
    waited = [run_concurrently(trace.requests, cache, lambda one: one.output_tokens) for cache in caches]
    assert [(course.waited_request_count, course.waited_ms) for course in waited] == [(1, 10), (0, 0)]


prompts = st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=7)


@pytest.mark.slow
@given(prompts, st.integers(3, 5))
@settings(max_examples=150)
def test_no_other_choice_has_more_hits_than_the_optimum(asked_for: list[str], block_count: int) -> None:
    """Against every way to choose what stays: whole prefixes that fit beside the request's own blocks."""
    trace = trace_of(*asked_for)
    assert counts(trace, "min", block_count)[0] == most_hits(trace, block_count)


@given(prompts, st.integers(3, 5))
@settings(max_examples=50)
def test_the_pool_never_beats_the_optimum(asked_for: list[str], block_count: int) -> None:
    """Nor does it ask for a block that it has."""
    trace = trace_of(*asked_for)
    hits, evictions = counts(trace, "lru", block_count)
    assert hits <= counts(trace, "min", block_count)[0]
    assert evictions <= trace.asked_block_count - hits


def most_hits(trace: Trace, block_count: int) -> int:
    """Returns the most hits there can be, by trying everything."""
    parents = {
        name: parent
        for request in trace.requests
        for parent, name in zip([-1, *request.block_names], request.block_names, strict=False)
    }

    @cache
    def best(index: int, present: frozenset[int]) -> int:
        if index == len(trace.requests):
            return 0
        own = trace.requests[index].block_names
        matched = len(present.intersection(own))
        return matched + max(best(index + 1, kept) for kept in choices(trace.requests[index], present))

    def choices(request: Request, present: frozenset[int]) -> Iterator[frozenset[int]]:
        own = frozenset(request.block_names)
        others = present - own
        for count in range(min(len(others), block_count - len(own)) + 1):
            for kept in map(frozenset, combinations(sorted(others), count)):
                if all(parents[name] in kept | own | {-1} for name in kept):
                    yield kept | own

    return best(0, frozenset())


def test_capacities_are_counts_or_shares_of_the_distinct_blocks() -> None:
    """A share is rounded up; each capacity is tried once, the smallest first."""
    assert block_counts(["5%", "1828", "2.5%", "1828", "100%"], 182_790) == [1_828, 4_570, 9_140, 182_790]
    assert block_counts(["0.0001%"], 100) == [1]


@pytest.mark.parametrize("text", ["0", "-1", "5.5", "5 %%", "many", "0%", "", "9" * 12, "1e3"])
def test_what_is_no_capacity_is_refused(text: str) -> None:
    """In one line."""
    with pytest.raises(CommandError, match="blocks"):
        block_counts([text], 1_000)
