"""FreeRuns: each free block in one place, in runs as long as they can be."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvharbor.pool.runs import FreeRuns


def test_a_new_table_takes_from_the_front_of_the_longest_run() -> None:
    """[P5] The longest free run serves a new table, so that its views are long."""
    free = FreeRuns(0, 10)
    assert free.take(3) == [0, 1, 2]
    free.take(1)
    free.give([0, 1, 2])
    assert free.take(2) == [4, 5]


def test_a_table_grows_by_extending_its_last_run() -> None:
    """[P5] The blocks right behind the table come first, even from a short run."""
    free = FreeRuns(0, 10)
    free.take(10)
    free.give([3, 4, 6, 7, 8, 9])
    assert free.take(4, after=2) == [3, 4, 6, 7]


def test_neighbours_merge_into_one_run() -> None:
    """[P4] Blocks given back in any order join their neighbours: one run, one place for each block."""
    free = FreeRuns(5, 6)
    free.take(6)
    free.give([10, 6, 8])
    assert free.run_count == 3
    free.give([9, 5, 7])
    assert (free.run_count, free.count, list(free)) == (1, 6, [5, 6, 7, 8, 9, 10])


def test_an_empty_pool_of_runs_has_nothing() -> None:
    """No blocks: no runs, and taking none is fine."""
    free = FreeRuns(3, 0)
    assert (free.count, free.run_count, list(free), free.take(0)) == (0, 0, [], [])


def test_the_heap_of_lengths_does_not_grow_with_use() -> None:
    """[G9] A million takes and gives leave no more stale lengths than a constant beside the runs."""
    free = FreeRuns(0, 64)
    for _ in range(2_000):
        free.give(free.take(3))
    assert len(free._longest) <= 2 * free.run_count + 65


@settings(max_examples=60)
@given(st.data())
def test_runs_agree_with_a_set(data: st.DataObject) -> None:
    """[P4] Against a plain set: what is taken was free, what is given is free again, runs are maximal."""
    first = data.draw(st.integers(0, 3))
    total = data.draw(st.integers(1, 24))
    free, naive = FreeRuns(first, total), set(range(first, first + total))
    out: list[int] = []
    for _ in range(data.draw(st.integers(1, 25))):
        gives = data.draw(st.booleans())
        if out and gives:
            back = data.draw(st.lists(st.sampled_from(out), unique=True, min_size=1))
            free.give(back)
            naive.update(back)
            out = [block for block in out if block not in back]
        else:
            count = data.draw(st.integers(0, len(naive)))
            after = data.draw(st.one_of(st.none(), st.sampled_from(out))) if out else None
            longest = _longest(naive)
            extends = after is not None and after + 1 in naive
            taken = free.take(count, after)
            assert len(taken) == len(set(taken)) == count
            assert naive.issuperset(taken)
            if taken and extends:
                assert taken[0] == (after or 0) + 1
            elif taken:
                assert taken[: min(count, longest)] == list(range(taken[0], taken[0] + min(count, longest)))
            naive.difference_update(taken)
            out += taken
        assert (list(free), free.count, free.run_count) == (sorted(naive), len(naive), len(_runs(naive)))


def _runs(blocks: set[int]) -> list[int]:
    starts = [block for block in sorted(blocks) if block - 1 not in blocks]
    return [next(n for n in range(1, len(blocks) + 1) if start + n not in blocks) for start in starts]


def _longest(blocks: set[int]) -> int:
    return max(_runs(blocks), default=0)
